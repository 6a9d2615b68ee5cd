"""`kvfold lm-eval`: lm-eval's own command line, where the model `kvfold` is known.

lm-eval finds models of other packages only if something has imported them; this command does, and
hands every argument on as it stands.
"""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = (
    "lm-eval's own command line, where the model `kvfold` is known.\n\n"
    "Example: kvfold lm-eval --model kvfold --model_args "
    "pretrained=smollm2-135m,addon=smollm2-csa2 --tasks lambada_openai --limit 100\n"
)
"""What lm-eval's help, which follows, can't know."""


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command(
        "lm-eval",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )(run)


def run(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS...", help="Whatever lm-eval takes.")
    ] = None,
) -> None:
    """Run lm-eval's command line with kvfold's model (--model kvfold)."""
    from kvfold.evaluation.tasks.harness_model import command_line

    given = arguments or ["--help"]
    if given[-1] in ("-h", "--help"):
        typer.echo(EXAMPLE)
    command_line(given)
