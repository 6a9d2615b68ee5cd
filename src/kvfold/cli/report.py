"""`kvfold report`: a page, Markdown or tables of runs that `kvfold evaluate --tasks` made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvfold.cli.evaluate_tasks import hold_against
from kvfold.cli.options import console
from kvfold.cli.suite_options import FailUnderOption

HELP = (
    "Make one HTML page of runs of `kvfold evaluate --tasks`; it loads nothing from anywhere.\n\n"
    "With --markdown also a table for a README; without either the figures are shown here.\n\n"
    "Example: kvfold report results/run --out report.html --markdown table.md"
)


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("report", help=HELP)(report_command)


def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the page here.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write Markdown here.")
    ] = None,
    remarks: Annotated[
        list[str] | None,
        typer.Option(
            "--remark",
            metavar="TEXT",
            help="Say this at the top of page and Markdown; may be repeated.",
        ),
    ] = None,
    fail_under: FailUnderOption = None,
) -> None:
    """Read, write and show; see HELP."""
    from kvfold.evaluation.gate import read_rules
    from kvfold.evaluation.page.html import render_page
    from kvfold.evaluation.page.markdown import render_markdown
    from kvfold.evaluation.page.runs import read_run
    from kvfold.evaluation.page.table import cost_tables, figures_table
    from kvfold.evaluation.report import write_atomically

    if out is not None and markdown is not None and out.resolve() == markdown.resolve():
        raise typer.BadParameter(
            f"--out and --markdown name one file, {out}, which can only be one of them; name two"
        )
    if remarks and out is None and markdown is None:
        raise typer.BadParameter(
            "--remark is for a page or Markdown; name a file with --out or --markdown, or leave it"
        )
    rules = () if fail_under is None else read_rules(fail_under)
    runs = [read_run(folder) for folder in folders]
    screen = console()
    if out is not None:
        write_atomically(out, render_page(runs, remarks or ()).encode())
        screen.print(f"Page: {out}", highlight=False, markup=False)
    if markdown is not None:
        write_atomically(markdown, render_markdown(runs, remarks or ()).encode())
        screen.print(f"Markdown: {markdown}", highlight=False, markup=False)
    if out is None and markdown is None:
        for run in runs:
            screen.print(f"{run.folder}: {run.title}", style="bold", highlight=False, markup=False)
            screen.print(figures_table(run))
            for table in cost_tables(run):
                screen.print(table)
    hold_against(screen, rules, runs)
