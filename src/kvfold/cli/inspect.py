"""`kvfold inspect`: what a model's layers are, what its cache costs, what each preset saves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from math import inf
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvfold.cli.options import (
    BytesPerTokenOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    PlanOption,
    TimesSmallerOption,
    budget_plan,
    console,
    load_model,
    only_one,
    read_plan,
    text_windows,
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
DECAY_WINDOW = 1024
DECAY_WINDOWS = 8
SHOWN_REPLAYS = (128, 256, 512)
SHOWN_SHARES = (0.01, 0.001)
K_NORM_NAMES = {"none": "-", "rms": "rms, w", "rms_plus_one": "rms, 1+w"}


def register(app: typer.Typer) -> None:
    """Add the subcommand to the application."""
    app.command(name="inspect")(inspect_model)


def inspect_model(
    model: ModelArgument = "smollm2-135m",
    as_json: JsonOption = False,
    plan: PlanOption = None,
    times_smaller: TimesSmallerOption = None,
    bytes_per_token: BytesPerTokenOption = None,
    decay: Annotated[
        bool,
        typer.Option("--decay", help="Load the weights and measure how fast states forget."),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="With --decay: text to measure on, from its start; Python's held-out "
            "documentation by default.",
        ),
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help=f"With --decay: windows of text ({DECAY_WINDOWS}).")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help=f"With --decay: tokens of each ({DECAY_WINDOW}).")
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Show a model's layers, its cache in bytes, and what each preset would save.

    Reads the model's configuration only, never its weights, unless --decay asks how much of the
    state of each linear-attention layer is left some tokens later. A plan of your own (--plan), or
    the best plan for a budget (--times-smaller, --bytes-per-token), is one more row.

    Example: kvfold inspect Qwen/Qwen3.5-4B --times-smaller 12
    """
    from kvfold.anatomy import anatomy
    from kvfold.models import load_config

    only_one(times_smaller=times_smaller, bytes_per_token=bytes_per_token)
    described = anatomy(load_config(model))
    measured: dict[str, Any] | None = None
    if decay:
        measured = _measure_decay(model, described, data, windows, window, dtype, device)
    else:
        _needs_decay(data=data, windows=windows, window=window, dtype=dtype, device=device)
    own_plan = None if plan is None else read_plan(plan)
    if own_plan is not None:
        own_plan.check(described)
    own = {
        "your plan": own_plan,
        "your budget": budget_plan(described, times_smaller, bytes_per_token),
    }
    report = build_report(model, described, own)
    if measured is not None:
        report["decay"] = measured
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    screen = console()
    screen.print(f"[bold]{escape(model)}[/]: {_headline(described)}")
    screen.print(_layer_table(described))
    screen.print(_cache_lines(report))
    screen.print(_saving_table(report))
    screen.print(_description_table(report))
    if measured is not None:
        screen.print(_decay_table(measured))


def _needs_decay(**options: Any) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise typer.BadParameter(
            f"only --decay loads a model and measures on text; got {', '.join(given)} without it; "
            "add --decay"
        )


def _measure_decay(
    model: str,
    described: Anatomy,
    data: str | None,
    windows: int | None,
    window: int | None,
    dtype: str | None,
    device: str | None,
) -> dict[str, Any]:
    from kvfold.fitting.decay import linear_layers, measure_decay

    linear_layers(described)  # an error that comes before the weights are loaded
    loaded, tokenizer = load_model(model, dtype, device)
    tokens = text_windows(
        data, tokenizer, window=window or DECAY_WINDOW, windows=windows or DECAY_WINDOWS
    )
    return measure_decay(loaded, tokens).to_dict()


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


def _decay_table(measured: dict[str, Any]) -> Table:
    replays = [str(t) for t in SHOWN_REPLAYS if t <= measured["window"]]
    shares = " / ".join(f"{100 * share:g}%" for share in SHOWN_SHARES)
    text = f"{measured['windows']} windows of {measured['window']:,} tokens"
    table = Table(
        title=f"What linear-attention states forget, on {text}",
        title_justify="left",
        caption=f"Half-life in tokens, at a head's mean decay. After N tokens: how many heads "
        f"keep more than {shares} of a state (mean over positions).",
        caption_justify="left",
    )
    for heading in ("layer", "heads", "shortest", "median half-life", "longest"):
        table.add_column(heading, justify="right")
    for tokens in replays:
        table.add_column(f"after {tokens}", justify="right")
    for layer in measured["layers"]:
        heads = layer["heads"]
        lives = [inf if h["half_life"] is None else h["half_life"] for h in heads]
        kept = (
            " / ".join(str(sum(h["kept"][t] > share for h in heads)) for share in SHOWN_SHARES)
            for t in replays
        )
        spread = (_tokens(min(lives)), _tokens(median(lives)), _tokens(max(lives)))
        table.add_row(str(layer["layer"]), str(len(heads)), *spread, *kept)
    return table


def _tokens(count: float) -> str:
    return "no end" if count == inf else f"{count:,.{0 if count >= 100 else 1}f}"
