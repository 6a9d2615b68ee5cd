"""A recipe that runs in a second on a tiny model, and ways to break it off."""

from __future__ import annotations

import json

import torch

from kvfold.fitting.recipe import Recipe
from kvfold.fitting.stages import run_recipe

PLAN = {
    "anchors": 2,
    "window": 6,
    "depth": [{"method": "latent", "layers": [1, 2, 3, 4], "rank": 64}],
    "sequence": [{"method": "pool", "layers": [1, 2, 3, 4], "group": 2, "gate": "head"}],
}
TIMES = ("seconds", "tokens_per_second", "solve_seconds")


class Letters:
    """A tokenizer of one token a character; end of text is token 2, begin of text token 1."""

    eos_token_id, bos_token_id = 2, 1

    def __call__(self, text, *, verbose, add_special_tokens=True):
        return {"input_ids": [3 + ord(c) for c in text]}


def write_sums(folder):
    """The text of the recipe."""
    lines = [json.dumps({"text": f"{n} times {n} is {n * n}, as known."}) for n in range(160)]
    (folder / "sums.jsonl").write_text("\n".join(lines))


def made_recipe(**keys):
    whole = {
        "name": "test",
        "model": "unused",
        "plan": PLAN,
        "text": [{"source": "${DATA}/sums.jsonl"}],
        "seq": 48,
        "held_out": 240,
        "stages": [
            {"stage": "closed-form", "tokens": 1920},
            {"stage": "gates", "steps": 8, "moves": 2, "queries": 16},
        ],
    }
    return Recipe.from_dict({**whole, **keys})


def run(model, data, work, chosen=None, **options):
    options = {"data": data, "progress": False, "checkpoint_every": 2, **options}
    return run_recipe(chosen or made_recipe(), model, Letters(), work, **options)


def untimed(report):
    if isinstance(report, dict):
        return {key: untimed(value) for key, value in report.items() if key not in TIMES}
    return [untimed(item) for item in report] if isinstance(report, list) else report


def same_weights(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Stop(Exception):  # noqa: N818
    pass


def stopping(monkeypatch, owner, name, after):
    """Let a function be called so many times, then stop the run."""
    calls = iter(range(10_000))
    real = getattr(owner, name)

    def counted(*args, **kwargs):
        if next(calls) >= after:
            raise Stop
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
