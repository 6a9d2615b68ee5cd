"""`kvfold inspect`: what a model's layers are, what its cache costs, what each preset saves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvfold.cli.options import (
    BytesPerTokenOption,
    ModelArgument,
    PlanOption,
    TimesSmallerOption,
    budget_plan,
    console,
    only_one,
    read_plan,
)
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
    plan: PlanOption = None,
    times_smaller: TimesSmallerOption = None,
    bytes_per_token: BytesPerTokenOption = None,
) -> None:
    """Show a model's layers, its cache in bytes, and what each preset would save.

    Reads the model's configuration only, never its weights. A plan of your own (--plan), or the
    best plan for a budget (--times-smaller, --bytes-per-token), is one more row.

    Example: kvfold inspect Qwen/Qwen3.5-4B --times-smaller 12
    """
    from kvfold.anatomy import anatomy
    from kvfold.models import load_config

    only_one(times_smaller=times_smaller, bytes_per_token=bytes_per_token)
    described = anatomy(load_config(model))
    own_plan = None if plan is None else read_plan(plan)
    if own_plan is not None:
        own_plan.check(described)
    own = {
        "your plan": own_plan,
        "your budget": budget_plan(described, times_smaller, bytes_per_token),
    }
    report = build_report(model, described, own)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    screen = console()
    screen.print(f"[bold]{escape(model)}[/]: {_headline(described)}")
    screen.print(_layer_table(described))
    screen.print(_cache_lines(report))
    screen.print(_saving_table(report))
    screen.print(_description_table(report))


def build_report(
    model: str, described: Anatomy, own: Mapping[str, Plan | None] = MappingProxyType({})
) -> dict[str, Any]:
    """Everything that `inspect` shows, as plain data; bytes are for a 16-bit cache of one row.

    own: plans beside the presets, by the name of their row; None for no row.
    """
    from kvfold.presets import PRESETS, preset
    from kvfold.runtime.ledger import plain_bytes

    plain = {tokens: plain_bytes(described, tokens).total for tokens in LENGTHS}
    plans: dict[str, Any] = {}
    for name in PRESETS:
        try:
            plans[name] = _saving(preset(name, described), described, plain)
        except PlanError as error:
            plans[name] = {"unavailable": str(error)}
    for name, plan in own.items():
        if plan is not None:
            plans[name] = _saving(plan, described, plain)
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
    from kvfold.describe import describe
    from kvfold.runtime.ledger import predict_bytes

    saving: dict[str, Any] = {"plan": plan.to_dict(), "description": describe(plan, described)}
    for resident in RESIDENCES:
        held = plan.replace(resident=resident)
        try:
            sizes = {tokens: predict_bytes(held, described, tokens).total for tokens in plain}
        except PlanError:
            if resident == "auto":
                raise
            continue  # a model whose RoPE changes can't rebuild keys
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
        cells = {
            resident: tuple(
                f"{readable_bytes(saving[resident]['bytes'][str(n)])}  "
                f"{saving[resident]['times_smaller'][str(n)]:.2f}x"
                for n in LENGTHS
            )
            for resident in RESIDENCES
            if resident in saving
        }
        if len(set(cells.values())) == 1:
            table.add_row(name, ", ".join(cells), *cells[RESIDENCES[0]])
            continue
        for row, resident in enumerate(cells):
            table.add_row("" if row else name, resident, *cells[resident])
    return table


def _description_table(report: dict[str, Any]) -> Table:
    table = Table(
        title="What each folds; bytes of one token of history, as stored (16-bit)",
        title_justify="left",
        box=None,
        show_header=False,
        padding=(0, 1),
    )
    for name, saving in report["plans"].items():
        table.add_row(name, saving.get("description") or saving["unavailable"])
    return table
