"""`kvfold inspect`: what a model's layers are, what its cache costs, what each preset saves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvfold.cli.fit import read_plan
from kvfold.cli.options import ModelArgument, console
from kvfold.errors import PlanError

if TYPE_CHECKING:
    from kvfold.anatomy import Anatomy, LayerAnatomy
    from kvfold.plan import Plan

LENGTHS = (4_096, 32_768, 131_072)
RESIDENCES = ("auto", "shared")
KIND_NAMES = {
    "full_attention": "full attention",
    "sliding_attention": "sliding attention",
    "linear_attention": "linear attention",
}
K_NORM_NAMES = {"none": "-", "rms": "rms, w", "rms_plus_one": "rms, 1+w"}


def register(app: typer.Typer) -> None:
    """Add the subcommand to the application."""
    app.command(name="inspect")(inspect_model)


def inspect_model(
    model: ModelArgument = "smollm2-135m",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A plan of your own (YAML or JSON), as one more row."),
    ] = None,
) -> None:
    """Show a model's layers, its cache in bytes, and what each preset would save.

    Reads the model's configuration only, never its weights.

    Example: kvfold inspect Qwen/Qwen3.5-4B
    """
    from kvfold.anatomy import anatomy
    from kvfold.models import load_config

    described = anatomy(load_config(model))
    own_plan = None if plan is None else read_plan(plan)
    if own_plan is not None:
        own_plan.check(described)
    report = build_report(model, described, own_plan)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    screen = console()
    screen.print(f"[bold]{escape(model)}[/]: {_headline(described)}")
    screen.print(_layer_table(described))
    screen.print(_cache_lines(report))
    screen.print(_saving_table(report))


def build_report(model: str, described: Anatomy, own_plan: Plan | None = None) -> dict[str, Any]:
    """Everything that `inspect` shows, as plain data; bytes are for a 16-bit cache of one row."""
    from kvfold.presets import PRESETS, preset
    from kvfold.runtime.ledger import plain_bytes

    plain = {tokens: plain_bytes(described, tokens).total for tokens in LENGTHS}
    plans: dict[str, Any] = {}
    for name in PRESETS:
        try:
            plans[name] = _saving(preset(name, described), described, plain)
        except PlanError as error:
            plans[name] = {"unavailable": str(error)}
    if own_plan is not None:
        plans["your plan"] = _saving(own_plan, described, plain)
    return {
        "model": model,
        "family": described.family.name,
        "model_type": described.model_type,
        "num_layers": described.num_layers,
        "hidden_size": described.hidden_size,
        "max_positions": described.max_positions,
        "rope_type": described.rope_type,
        "layers": [asdict(layer) for layer in described.layers],
        "bytes_per_token": described.bytes_per_token(),
        "recurrent_bytes": described.recurrent_bytes(),
        "plain_bytes": {str(tokens): size for tokens, size in plain.items()},
        "plans": plans,
    }


def _saving(plan: Plan, described: Anatomy, plain: dict[int, int]) -> dict[str, Any]:
    """Bytes and times smaller as attached by default (`auto`) and with codes only (`shared`)."""
    from kvfold.runtime.ledger import predict_bytes

    saving: dict[str, Any] = {"plan": plan.to_dict()}
    for resident in RESIDENCES:
        held = plan.replace(resident=resident)
        sizes = {tokens: predict_bytes(held, described, tokens).total for tokens in plain}
        saving[resident] = {
            "bytes": {str(tokens): size for tokens, size in sizes.items()},
            "times_smaller": {
                str(tokens): round(plain[tokens] / size, 3) for tokens, size in sizes.items()
            },
        }
    return saving


def _headline(described: Anatomy) -> str:
    return (
        f"{described.family.name} ({described.model_type}), {described.num_layers} layers, "
        f"hidden {described.hidden_size:,}, up to {described.max_positions:,} positions, "
        f"RoPE {described.rope_type}"
    )


def _layer_table(described: Anatomy) -> Table:
    table = Table(title="Layers", title_justify="left", caption_justify="left")
    for heading in ("layers", "kind", "heads", "kv heads", "head dim", "rotary", "k_norm", "gate"):
        table.add_column(heading)
    table.add_column("bytes a token", justify="right")
    for like, indices in _alike(described.layers):
        kind = KIND_NAMES[like.kind]
        if like.sliding_window is not None:
            kind += f" ({like.sliding_window:,})"
        linear = like.kind == "linear_attention"
        table.add_row(
            layer_ranges(indices),
            kind,
            str(like.heads),
            "-" if linear else str(like.kv_heads),
            str(like.head_dim),
            "-" if linear else f"{like.rotary_dim} of {like.head_dim}",
            K_NORM_NAMES[like.k_norm],
            "yes" if like.output_gate else "no",
            f"{4 * like.kv_width:,} each" if not linear else "0 (state)",
        )
    return table


def _alike(layers: Sequence[LayerAnatomy]) -> list[tuple[LayerAnatomy, list[int]]]:
    groups: dict[LayerAnatomy, list[int]] = {}
    for layer in layers:
        groups.setdefault(replace(layer, index=0), []).append(layer.index)
    return list(groups.items())


def layer_ranges(indices: Sequence[int]) -> str:
    """Layer numbers in short: `0-14`, `3, 7 .. 31` where runs repeat evenly, or `0-2, 9`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    steps = {(after[0] - before[0], after[-1] - before[-1]) for before, after in pairwise(runs)}
    if len(runs) > 3 and len(steps) == 1:
        return f"{names[0]}, {names[1]} .. {names[-1]}"
    return ", ".join(names)


def _cache_lines(report: dict[str, Any]) -> str:
    from kvfold.evaluation.report import readable_bytes

    lines = [f"Plain cache (16-bit): {report['bytes_per_token']:,} bytes a token"]
    if report["recurrent_bytes"]:
        state = readable_bytes(report["recurrent_bytes"])
        lines.append(f"Recurrent state: {state} a row, whatever the length (in all totals)")
    return "\n".join(lines)


def _saving_table(report: dict[str, Any]) -> Table:
    from kvfold.evaluation.report import readable_bytes

    table = Table(
        title="Cache of one row",
        title_justify="left",
        caption="2.00x: two times smaller than no compression. auto: as attached by default, "
        "quick to read. shared: only codes are kept, and keys and values rebuilt inside attention.",
        caption_justify="left",
    )
    table.add_column("preset")
    table.add_column("resident")
    for tokens in LENGTHS:
        table.add_column(f"{tokens // 1024}k tokens", justify="right")
    plain = report["plain_bytes"]
    table.add_row("no compression", "", *(readable_bytes(plain[str(n)]) for n in LENGTHS))
    for name, saving in report["plans"].items():
        if "unavailable" in saving:
            table.add_row(name, "does not fit this model", *[""] * len(LENGTHS))
            continue
        for row, resident in enumerate(RESIDENCES):
            sizes, times = saving[resident]["bytes"], saving[resident]["times_smaller"]
            cells = (f"{readable_bytes(sizes[str(n)])}  {times[str(n)]:.2f}x" for n in LENGTHS)
            table.add_row("" if row else name, resident, *cells)
    return table
