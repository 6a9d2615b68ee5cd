"""Options that several subcommands share, and what they are turned into.

Heavy imports stay inside functions, so that `kvfold --help` is quick.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

if TYPE_CHECKING:
    from torch import Tensor

    from kvfold.anatomy import Anatomy
    from kvfold.plan import Plan
    from kvfold.runtime.attach import AddOnLike
    from kvfold.store.addon import AddOn

WIDTH = 100

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="smollm2-135m or default (embedded), tiny-hybrid (trained on a made-up language), a "
        "folder or a hub id.",
    ),
]
AddOnOption = Annotated[
    list[str],
    typer.Option(
        "--addon",
        metavar="DIR",
        help="Add-on folder, one that comes with kvfold, or hub id; may be repeated.",
    ),
]
DtypeOption = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Dtype to load the model in; by default float32 on CPU, else bfloat16."),
]
DeviceOption = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...; found by default.")
]
KeepWindowOption = Annotated[
    int | None,
    typer.Option(min=0, help="Last tokens kept exact, instead of the add-on's own window."),
]
AnchorsOption = Annotated[
    int | None,
    typer.Option(min=0, help="First tokens kept exact, instead of the add-on's own anchors."),
]
ResidentOption = Annotated[
    Literal["auto", "expanded", "shared", "absorbed"] | None,
    typer.Option(help="How regenerated keys and values are held, instead of the add-on's way."),
]
PrefillOption = Annotated[
    Literal["full", "skip"] | None,
    typer.Option(
        help="Run prompts through all layers, or let most of each skip the upper ones, instead of "
        "the plan's way."
    ),
]
ReplayOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="T",
        help="Last tokens of a skipped prompt that run through all layers, instead of the plan's.",
    ),
]
PlanOption = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="A plan of your own, YAML or JSON.")
]
TimesSmallerOption = Annotated[
    float | None,
    typer.Option(
        metavar="N", help="The best plan whose history takes at least N times fewer bytes a token."
    ),
]
BytesPerTokenOption = Annotated[
    float | None,
    typer.Option(
        metavar="N", help="The best plan whose history takes at most N bytes a token (16-bit)."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def console(*, quiet: bool = False) -> Console:
    """The terminal for results: at most 100 columns, and 100 where there is no terminal.

    quiet: for a process that has nothing to show.
    """
    found = Console()
    width = min(found.width, WIDTH) if found.is_terminal else WIDTH
    return Console(width=width, quiet=quiet)


def only_one(**options: Any) -> None:
    """Raise `typer.BadParameter` if more than one of these options was given."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        names = [f"--{name.replace('_', '-')}" for name in options]
        raise typer.BadParameter(
            f"give only one of {', '.join(names[:-1])} and {names[-1]}; got {', '.join(given)}"
        )


def read_plan(path: Path) -> Plan:
    """A plan from a YAML or JSON file; raises `PlanError` or `typer.BadParameter`."""
    from kvfold.plan import Plan

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"can't read the plan {path}: {error}") from None
    return Plan.from_yaml(text)


def budget_plan(
    anatomy: Anatomy, times_smaller: float | None, bytes_per_token: float | None
) -> Plan | None:
    """The plan for the budget that was given, None for none; raises `PlanError`."""
    from kvfold.plan import Plan

    if times_smaller is None and bytes_per_token is None:
        return None
    return Plan.for_budget(anatomy, times_smaller=times_smaller, bytes_per_token=bytes_per_token)


def with_keys(plan: Plan, anatomy: Anatomy, **keys: Any) -> Plan:
    """The plan with the keys that are not None; raises `PlanError` if the model can't have it."""
    chosen = plan.replace(**{key: value for key, value in keys.items() if value is not None})
    chosen.check(anatomy)
    return chosen


def say_plans(screen: Console, model: Any, addons: Mapping[str, AddOnLike]) -> None:
    """Print in words what each add-on does, and what its history costs."""
    from kvfold.anatomy import anatomy
    from kvfold.describe import describe

    for name, addon in addons.items():
        words = describe(addon.plan, anatomy(model))
        screen.print(f"{name}: {words}", style="dim", highlight=False, markup=False)


def load_model(name: str, dtype: str | None, device: str | None) -> tuple[Any, Any]:
    """The model and its tokenizer; raises what `kvfold.models.load` does."""
    import torch

    from kvfold.models import load

    try:
        place = None if device is None else torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"{device!r} is not a device that can be used: {reason}") from None
    return load(name, dtype=None if dtype is None else getattr(torch, dtype), device=place)


def load_addons(names: Sequence[str], model: Any) -> dict[str, AddOn]:
    """Add-ons by short name, on the model's device and in its dtype, checked against it."""
    from kvfold.store.addon import AddOn

    loaded: dict[str, AddOn] = {}
    for name in names:
        addon = AddOn.from_pretrained(name)
        addon.check_base(model)
        loaded[_short_name(name, loaded)] = addon.to(dtype=model.dtype, device=model.device)
    return loaded


def _short_name(name: str, taken: dict[str, Any]) -> str:
    short = Path(name).resolve().name if Path(name).is_dir() else name.rsplit("/", 1)[-1]
    if short not in taken:
        return short
    return next(f"{short} ({n})" for n in range(2, len(taken) + 3) if f"{short} ({n})" not in taken)


MOST_DIGITS = 18
"""Of a number of tokens or items: far more than there can be of anything."""


def parse_lengths(text: str) -> tuple[int, ...]:
    """Token counts from `4096,32768` or `4k,32k`; raises `typer.BadParameter`."""
    lengths = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(rf"([0-9]{{1,{MOST_DIGITS}}})(k?)", part.lower().replace("_", ""))
        if match is None or int(match[1]) == 0:
            raise typer.BadParameter(
                f"lengths are token counts such as 4096,32768 or 4k,32k; got {part[:80]!r}"
            )
        lengths.append(int(match[1]) * (1024 if match[2] else 1))
    if not lengths:
        raise typer.BadParameter("name at least one length, such as 4096")
    return tuple(sorted(set(lengths)))


def text_windows(data: str | None, tokenizer: Any, *, window: int, windows: int | None) -> Tensor:
    """The first windows of a text, or of the default corpus's held-out part for None.

    A file that is named is used whole, from its start.
    """
    from kvfold.fitting.corpus import load_text, token_windows

    text = load_text(data, part="held_out" if data is None else "all", tokenizer=tokenizer)
    tokens = None if windows is None else windows * window
    return token_windows(text, tokenizer, window=window, tokens=tokens)
