"""What each process of tests/fitting/test_workers.py runs: a job by name, into a folder.

Started by `test_workers.py` with the environment of a launcher, or without one, alone.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from kvfold.anatomy import anatomy
from kvfold.errors import FitError
from kvfold.fitting import closed_form
from kvfold.fitting.distil import Distiller
from kvfold.fitting.fit import fit
from kvfold.fitting.gram import Gram, Sketch
from kvfold.fitting.recipe import Recipe
from kvfold.fitting.stages import run_recipe
from kvfold.fitting.workers import Workers
from kvfold.plan import Plan
from kvfold.runtime.capture import capture
from kvfold.runtime.sharding import shard

LOST = 17
"""Exit status of a worker that was told of another's loss by the right error."""
KILLED_AT = 6
"""Batches, or steps, after which worker 1 dies: the second checkpoint has been written."""

RECIPE = {
    "name": "two workers",
    "model": "unused",
    "plan": {
        "anchors": 2,
        "window": 6,
        "depth": [{"method": "latent", "layers": [1, 2, 3], "rank": 24}],
        "sequence": [{"method": "pool", "layers": [1, 2, 3], "group": 2, "gate": "head"}],
    },
    "text": [
        {"source": "${DATA}/sums.jsonl"},
        {"source": "self", "weight": 0.5, "tokens": 480},
    ],
    "seq": 48,
    "held_out": 240,
    "self_text": {"batch": 2},
    "stages": [
        {"stage": "closed-form", "tokens": 1920},
        {"stage": "refine", "steps": 8, "moves": 2, "rows": 2, "queries": 16, "look_every": 4},
        {"stage": "distil", "steps": 9, "rows": 4, "rows_at_once": 2, "look_every": 3},
        {"stage": "gates", "steps": 4, "moves": 2, "queries": 16},
    ],
}
"""A step of distilling takes 2 rows at once: the share of one of two workers."""


class Letters:
    """A tokenizer of one token a character; end of text is token 2, begin of text token 1."""

    eos_token_id, bos_token_id, unk_token_id, pad_token_id = 2, 1, None, None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Ids as a tokenizer gives them."""
        return {"input_ids": [3 + ord(c) for c in text]}


def tiny_model(vocab_size: int = 97) -> Any:
    """A random llama of four layers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def rows_of(width: int) -> torch.Tensor:
    """Rows far from zero: (30, 8, width)."""
    generator = torch.Generator().manual_seed(1)
    return 50 + torch.randn(30, 8, width, generator=generator).cumsum(-1)


def sums(workers: Workers, folder: Path) -> None:
    """A Gram matrix and a sketch of shares of the same rows, and sums of small tensors."""
    rows, targets = rows_of(24), rows_of(5).flip(0)
    gram, sketch = Gram(24, {"y": 5}), Sketch(24, 16, torch.ones(24))
    for x, y in zip(workers.share(rows), workers.share(targets), strict=True):
        gram.add(x, {"y": y})
        sketch.add(x)
    gram.add_up(workers)
    sketch.add_up(workers)
    number = torch.tensor([1.0 + workers.rank])
    made = {
        "count": gram.count,
        "covariance": gram.covariance(),
        "raw": gram.covariance(centred=False),
        "cross": gram.cross_covariance("y"),
        "sketch": sketch.centred_product(),
        "mean": sketch.features.mean,
        "sum": workers.all_sum(number.clone()),
        "average": workers.all_mean(number.clone()),
        "of_first": workers.all_of_first(number.clone()),
    }
    torch.save(made, folder / f"{workers.rank}.pt")


def tiny_fit(workers: Workers, folder: Path) -> None:
    """A fit of every kind of sums, checkpointed, on a shared text."""
    plan = Plan.from_dict(
        {
            "anchors": 2,
            "window": 4,
            "depth": [
                {"method": "ced", "split": 0, "layers": [0]},
                {"method": "csa2", "source": 0, "readers": [1]},
                {"method": "latent", "layers": [2, 3], "rank": 12},
            ],
        }
    )
    tokens = torch.randint(3, 97, (25, 32), generator=torch.Generator().manual_seed(2))
    model = tiny_model()
    addon = fit(
        model,
        plan,
        tokens,
        batch=1,
        checkpoint=folder / "checkpoint",
        checkpoint_every=2,
        progress=False,
        workers=workers,
    )
    made = {"weights": addon.pipelines.state_dict(), "decoded": decoded(model, addon, tokens[:4])}
    torch.save(made, folder / f"{workers.rank}.pt")


@torch.no_grad()
def decoded(model: Any, addon: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keys and values that an add-on makes of some text: what its weights mean."""
    sources = {source for pipeline in addon.pipelines for source in pipeline.inputs}
    activations = capture(model, anatomy(model), sources, ids)
    made = {}
    for pipeline in addon.pipelines:
        code = pipeline.depth.encode(activations)
        for layer in pipeline.layers:
            keys, values = pipeline.depth.decode(layer, code)
            made |= {f"keys of {layer}": keys, f"values of {layer}": values}
    return made


def killed(workers: Workers, folder: Path) -> None:
    """The same fit, of which worker 1 dies."""
    real, taken = closed_form.capture, []

    def dying(*args: Any) -> Any:
        taken.append(1)
        if workers.rank == 1 and len(taken) == KILLED_AT:
            os._exit(1)
        return real(*args)

    closed_form.capture = dying  # type: ignore[assignment]
    _told_of_loss(tiny_fit, workers, folder)


def _told_of_loss(job: Any, workers: Workers, folder: Path) -> None:
    """Run a job that another worker's death must end by the right error."""
    try:
        job(workers, folder)
    except FitError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(LOST)  # not held up by the connection that is gone


def recipe(workers: Workers, folder: Path) -> None:
    """All stages of a recipe, logged by whoever logs."""

    def log(line: dict[str, Any]) -> None:
        with (folder / f"{workers.rank}.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")

    addon = run_recipe(
        Recipe.from_dict(RECIPE),
        tiny_model(160),
        Letters(),
        folder / "work",
        data=folder.parent / "data",
        checkpoint_every=2,
        log=log,
        progress=True,
        workers=workers,
    )
    torch.save(dict(enumerate(addon.parameters())), folder / f"{workers.rank}.pt")
    (folder / f"{workers.rank}.json").write_text(json.dumps(addon.report))


def sharded(workers: Workers, folder: Path) -> None:
    """All stages of a recipe, on a model that is spread over the workers."""
    unsharded(workers, folder, spread=True)


def unsharded(workers: Workers, folder: Path, *, spread: bool = False) -> None:
    """All stages of a recipe without text of the model's own."""
    own = [part for part in RECIPE["text"] if part["source"] != "self"]  # type: ignore[index]
    chosen = Recipe.from_dict({**RECIPE, "text": own, "held_out": 384})
    model = tiny_model(160)
    layers = model.get_decoder().layers
    whole = sum(weight.numel() for weight in layers.parameters())
    if spread:
        shard(model, "cpu")
    held = sum(getattr(w, "_local_tensor", w).numel() for w in layers.parameters())
    addon = run_recipe(
        chosen,
        model,
        Letters(),
        folder / "work",
        data=folder.parent / "data",
        progress=False,
        workers=workers,
    )
    torch.save(dict(enumerate(addon.parameters())), folder / f"{workers.rank}.pt")
    figures = {"report": addon.report, "whole": whole, "held": held}
    (folder / f"{workers.rank}.json").write_text(json.dumps(figures))


def recipe_killed(workers: Workers, folder: Path) -> None:
    """The same recipe, of which worker 1 dies while it distils."""
    real = Distiller.step

    def dying(self: Distiller, log: Any = None) -> None:
        if workers.rank == 1 and self.done == KILLED_AT - 1:
            os._exit(1)
        real(self, log)

    Distiller.step = dying  # type: ignore[method-assign]
    _told_of_loss(recipe, workers, folder)


def differing(workers: Workers, folder: Path) -> None:
    """Workers that were given different checkpoints."""
    try:
        workers.agree("checkpoint", 3, workers.rank)
    except FitError as error:
        (folder / f"{workers.rank}.txt").write_text(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    job, out = sys.argv[1], Path(sys.argv[2])
    joined = Workers.join(cpu=True, timeout=timedelta(seconds=300))
    jobs = (sums, tiny_fit, killed, recipe, sharded, unsharded, recipe_killed, differing)
    {made.__name__: made for made in jobs}[job](joined, out)
    joined.leave()
