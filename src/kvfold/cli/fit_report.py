"""What `kvfold fit` ends with: tables of layers and of stages, and where the add-on is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from kvfold.cli.inspect import layer_ranges

if TYPE_CHECKING:
    from kvfold.store.addon import AddOn


def report_table(report: dict[str, Any]) -> Any:
    """A row for each layer that was fitted: held-out R^2 and attention-output cosine, and the
    error of its gate in the first and last tenth of the training, if it has one."""
    from rich import box
    from rich.table import Table

    gates = report.get("gates", {}).get("error", {})
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), caption=_caption(report), caption_justify="left"
    )
    table.add_column("layer", justify="right")
    table.add_column("method")
    for heading in ("R² of keys", "R² of values", "attention cosine"):
        table.add_column(heading, justify="right")
    if gates:
        table.add_column("gate error, before", justify="right")
        table.add_column("after", justify="right")
    layers = report.get("layers", {})
    for layer in sorted({*layers, *gates.get("first", {})}, key=int):
        figures = layers.get(layer, {})
        cells = [figures.get(key) for key in ("keys_r2", "values_r2", "attention_cosine")]
        cells += [gates[part].get(layer) for part in ("first", "last") if gates]
        shown = ("-" if cell is None else f"{cell:.4f}" for cell in cells)
        table.add_row(layer, figures.get("method", ""), *shown)
    return table


def scanned_heads(report: dict[str, Any]) -> str:
    """How many heads' states are scanned over skipped tokens, layer by layer, in a line."""
    by_count: dict[int, list[int]] = {}
    for layer, count in report["scanned"].items():
        by_count.setdefault(count, []).append(int(layer))
    parts = [
        f"{count} in layer{'s' if len(layers) > 1 else ''} {layer_ranges(layers)}"
        for count, layers in by_count.items()
    ]
    return (
        f"States over skipped tokens: of {report['heads']} heads a layer, scanned are "
        f"{'; '.join(parts)}. The others forget them while the replay runs."
    )


def _caption(report: dict[str, Any]) -> str:
    caption = f"on {report.get('held_out_tokens', 0):,} held-out tokens"
    mean = report.get("mean_attention_cosine")
    if mean is not None:
        caption += f"; mean attention-output cosine {mean:.4f}"
    gates = report.get("gates")
    if gates:
        caption += (
            f"; gates trained for {gates['steps']} steps: squared error of the layer's output "
            "relative to its size, on the training text, mean of the first and last tenth"
        )
    return caption


def stages_table(report: Mapping[str, Any]) -> Any:
    """A row for each stage of a recipe: what it brought on held-out text, and whether it stayed."""
    from kvfold.evaluation.report import bare_table

    figures = report["held_out"]
    base, dropped, folded = (figures[key] for key in ("base", "dropped", "folded"))
    recovery = figures["recovery"]
    caption = (
        f"on {report['data']['held_out_tokens']:,} held-out tokens; KL a token from the plain "
        f"model, whose perplexity is {base['perplexity']:.2f}; with the history dropped KL "
        f"{dropped['kl']:.4f}, perplexity {dropped['perplexity']:.2f}"
    )
    if folded is not None:
        caption += f"; the add-on's {folded['kl']:.4f}, {folded['perplexity']:.2f}"
    if recovery is not None:
        caption += f"; recovery of the history {recovery:.3f}"
    table = bare_table(caption=caption)
    table.add_column("stage")
    for heading in ("time", "KL before", "KL after", "PPL after"):
        table.add_column(heading, justify="right")
    table.add_column("kept", overflow="fold")
    for stage in report["stages"]:
        table.add_row(
            stage["name"],
            f"{stage['seconds']:,.0f} s",
            _figure(stage["kl_before"], 4),
            _figure(stage["kl_after"], 4),
            _figure(stage["perplexity_after"], 2),
            "yes" if stage["kept"] else f"no: {escape(stage['why'])}",
        )
    return table


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def going_on(line: Mapping[str, Any]) -> str:
    """What an interrupted run goes on with, of its line in the log: stages kept, and done anew."""
    done, names = line["stages_done"], line["stages"]
    kept, left = ", ".join(names[:done]) or "none", ", ".join(names[done:]) or "none"
    changed = f"; changed: {', '.join(line['changed'])}" if line["changed"] else ""
    return f"Going on. Stages kept as they are: {kept}; to be done: {left}{changed}"


def say_where(
    screen: Console,
    addon: AddOn,
    output: Path,
    seconds: float,
    model: str,
    *,
    needs_data: bool = False,
) -> None:
    """How long it took, where the add-on is, and what to do next.

    needs_data: whether the default text is not what the model was fitted on.
    """
    size = addon.parameter_bytes() / 1e6
    screen.print(f"Fitted in {seconds:.0f} s; {size:.1f} MB of weights written to {output}.")
    how = " --continuation 128" if addon.plan.prefill == "skip" else ""
    how += " --data TEXT" if needs_data else ""
    screen.print(f"Next: kvfold evaluate {model} --addon {output}{how}", highlight=False)


def write_report(report: Mapping[str, Any], json_file: Path | None) -> None:
    """Write the report to a file, if one was named; raises `ReportError`."""
    if json_file is not None:
        from kvfold.evaluation.report import write_json

        write_json(json_file, report)
