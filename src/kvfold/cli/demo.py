"""`kvfold demo`: the whole job on a small model, in minutes, and what to do next."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.evaluate import show
from kvfold.cli.generate import answer_all, encode_prompt, side_by_side
from kvfold.cli.options import DeviceOption, DtypeOption, console, load_model

if TYPE_CHECKING:
    from rich.console import Console

    from kvfold.plan import Plan
    from kvfold.store.addon import AddOn

HELP = (
    "Fit, measure and try several add-ons on a small model; takes a few minutes.\n\n"
    "Needs no files of yours: the model is embedded and the text is Python's own "
    "documentation. The tables, a plot, all figures as JSON and the fitted add-ons are "
    "left in a folder.\n\n"
    "Example: kvfold demo -o kvfold-demo"
)

PRESETS = ("balanced", "8x", "k8v4", "ced", "csa2")
LENGTHS = (1024, 4096, 32768)
PROMPT_TOKENS = 320
QUESTION = "\n\nIn one sentence, what is the text above about?"


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("demo", help=HELP)(demo_command)


def demo_command(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="smollm2-135m (embedded), a folder or a hub id.")
    ] = "smollm2-135m",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for what is made.")
    ] = Path("kvfold-demo"),
    tokens: Annotated[int, typer.Option(min=512, help="Tokens to fit on.")] = 16_384,
    windows: Annotated[int, typer.Option(min=1, help="Held-out windows to measure on.")] = 4,
    window: Annotated[int, typer.Option(min=2, help="Tokens of each window.")] = 512,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Run the demo; see HELP."""
    import torch

    from kvfold.fitting.corpus import calibration_windows

    began = time.perf_counter()
    torch.manual_seed(0)
    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is a file; name a folder")
    screen = console()
    loaded, tokenizer = load_model(model, dtype, device)
    text = calibration_windows(
        None, tokenizer, window=window, tokens=tokens, held_out_tokens=windows * window
    )
    plans = _plans(loaded)
    screen.rule(f"1. Fit {len(plans)} add-ons to {model} on {text.train.numel():,} tokens")
    addons = _fit(screen, loaded, plans, text.train, output)
    screen.rule("2. Measure them on held-out text, beside the plain model")
    _measure(screen, loaded, addons, text.held_out, model, output)
    screen.rule("3. One prompt through the plain and the folded model")
    _generate(screen, loaded, tokenizer, addons, text.held_out)
    screen.rule("Next")
    seconds = time.perf_counter() - began
    screen.print(_next_steps(model, output, seconds), highlight=False, markup=False)


def _plans(model: Any) -> dict[str, Plan]:
    """The presets that this model has the layers for."""
    from kvfold.anatomy import anatomy
    from kvfold.errors import PlanError
    from kvfold.presets import preset

    shape, made, refusals = anatomy(model), {}, []
    for name in PRESETS:
        try:
            made[name] = preset(name, shape)
        except PlanError as error:
            refusals.append(error)
    if not made:
        raise refusals[0]
    return made


def _fit(
    screen: Console, model: Any, plans: Mapping[str, Plan], tokens: Any, output: Path
) -> dict[str, AddOn]:
    from kvfold.fitting.together import fit_together

    start = time.perf_counter()
    addons = fit_together(model, plans, tokens)
    seconds = time.perf_counter() - start
    rate = tokens.numel() / seconds
    screen.print(f"Fitted in {seconds:.0f} s, {rate:,.0f} tokens/s; written to {output}:")
    for name, addon in addons.items():
        addon.save_pretrained(output / name)
        layers = addon.plan.folded_layers
        size = addon.parameter_bytes() / 1e6
        screen.print(
            f"  {output / name}: layers {layers[0]} to {layers[-1]}, {size:.1f} MB of weights",
            highlight=False,
        )
    return addons


def _measure(
    screen: Console,
    model: Any,
    addons: Mapping[str, AddOn],
    held_out: Any,
    name: str,
    output: Path,
) -> None:
    from kvfold.evaluation.runner import evaluate
    from kvfold.evaluation.speed import SpeedSettings

    with screen.status("measuring") as status:
        made = evaluate(
            model,
            addons,
            held_out,
            lengths=LENGTHS,
            speed_settings=SpeedSettings(history=512, decode_tokens=12, repeats=2),
            on_progress=lambda what: status.update(f"measuring: {what}"),
        )
    show(
        screen,
        made,
        {"model": name, "data": "held-out part of pydoc_data.topics", "seed": 0},
        json_file=output / "evaluation.json",
        plot=output / "quality-against-bytes.png",
        title=f"{name}: quality against bytes",
    )


def _generate(
    screen: Console, model: Any, tokenizer: Any, addons: Mapping[str, AddOn], held_out: Any
) -> None:
    """A prompt long enough that most of it is history when the answer begins."""
    from kvfold.evaluation.candidates import with_plan

    first, addon = next(iter(addons.items()))
    ways = ("expanded", "shared")
    runs = {f"{first}, {way}": with_plan(addon, resident=way) for way in ways}
    passage = tokenizer.decode(held_out.flatten()[:PROMPT_TOKENS])
    ids = encode_prompt(tokenizer, passage + QUESTION, raw=False)
    with screen.status("generating"):
        answers = answer_all(
            model, tokenizer, runs, ids,
            max_new_tokens=40, temperature=0.0, seed=0,
        )  # fmt: skip
    screen.print(
        f"{ids.shape[1]} prompt tokens (a held-out passage and a question); the last "
        f"{addon.plan.window} and first {addon.plan.anchors} stay exact, the others are folded. "
        "Expanded keeps what it regenerates and is fast; shared keeps only the codes and is small.",
        highlight=False,
    )
    screen.print(side_by_side(answers, width=screen.width))


def _next_steps(model: str, output: Path, seconds: float) -> str:
    return (
        f"Done in {seconds / 60:.1f} minutes. With a model and text of your own:\n"
        "  kvfold inspect MODEL                         what it keeps, and what could be saved\n"
        "  kvfold fit MODEL --corpus TEXT -o my-addon   60,000 tokens by default\n"
        "  kvfold evaluate MODEL --addon my-addon --data TEST.txt\n"
        f"Or try what was just made:\n"
        f"  kvfold generate {model} --addon {output / 'balanced'} --prompt-file FILE\n"
        "In Python: model, tokenizer = kvfold.load(MODEL), then\n"
        '  with kvfold.attach(model, kvfold.AddOn.from_pretrained("my-addon")):\n'
        "      model.generate(...)"
    )
