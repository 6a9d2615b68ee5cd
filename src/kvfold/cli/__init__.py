"""The command `kvfold`: one file per subcommand, each with `register(app)`.

Subcommand modules import what is heavy inside their functions, so that help comes at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from kvfold import __version__
from kvfold.errors import KvfoldError

SUBCOMMANDS = (
    "inspect",
    "fit",
    "evaluate",
    "report",
    "sweep",
    "generate",
    "serve",
    "snapshot",
    "vllm",
    "demo",
    "lm_eval",
)
FAILURE = 2


class Commands(TyperGroup):
    """The commands, with kvfold's own errors shown as one message instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand; a `KvfoldError` is printed in red and ends with exit code 2."""
        try:
            return super().invoke(ctx)
        except KvfoldError as error:
            Console(stderr=True).print(f"Error: {error}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(FAILURE) from None


def build_app() -> typer.Typer:
    """The command-line application with every subcommand."""
    app = typer.Typer(
        name="kvfold",
        cls=Commands,
        help="Cut a language model's KV cache with small learned add-ons.",
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in SUBCOMMANDS:
        import_module(f"kvfold.cli.{name}").register(app)
    return app


def main() -> None:
    """Entry point of the `kvfold` script."""
    build_app()()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvfold {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Cut a language model's KV cache with small learned add-ons.

    Try `kvfold demo` first: it fits and measures add-ons on a small embedded model.
    """
