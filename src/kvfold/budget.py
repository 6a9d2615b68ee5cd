"""What a plan costs: bytes of its history, and the plan for a budget of them; a prompt's work.

A token of history is one that has left the window. Only full-attention layers count: sliding
layers stop growing at their window, and recurrent states never grow. Figures are plain arithmetic
over what a plan stores, for a cache in 16 bits; no cache is made. They are those of
`evaluation.memory.history_bytes_per_token`, which counts a predicted cache instead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from kvfold.anatomy import Anatomy
from kvfold.errors import PlanError
from kvfold.methods import Bits, CodePart, Pipeline, build_pipelines
from kvfold.methods.turboquant import SCALE_BYTES, TurboQuant
from kvfold.plan import Plan

ELEMENT_SIZE = 2
"""Bytes of a value that is not quantised."""

RANK_MULTIPLE = 8
"""Ranks chosen for a budget are multiples of it, so that rows of codes start at whole words."""

SLACK = 1e-9
"""Relative; a budget that was computed from a plan is met by that plan in spite of rounding."""


POOL_GATE: Mapping[str, Any] = MappingProxyType({"gate": "channel", "mass_bias": True})
"""The best of the gate forms that were measured (results/axes)."""


@dataclass(frozen=True)
class Rung:
    """One way to compose the axes, over every full-attention layer.

    layers_per_code: neighbours that share a latent code, whose rank follows from the budget; None:
    each layer keeps its own keys and values. tokens_per_slot: 1 does not pool. bits: a value of
    keys and of values, None for 16; a latent code has the keys'. most_times_smaller: up to where
    this rung is better than those after it; one without a rank has one size and needs no limit.
    """

    layers_per_code: int | None = None
    tokens_per_slot: int = 1
    bits: tuple[int, int] | None = None
    most_times_smaller: float = math.inf


LADDERS: Mapping[str, tuple[Rung, ...]] = MappingProxyType(
    {
        "dense": (
            Rung(bits=(8, 8)),
            Rung(bits=(8, 4)),
            Rung(layers_per_code=5, bits=(8, 8), most_times_smaller=5),
            Rung(layers_per_code=5, bits=(5, 5), most_times_smaller=20),
            Rung(layers_per_code=5, bits=(4, 4), most_times_smaller=32),
            Rung(layers_per_code=5, tokens_per_slot=4, bits=(8, 8), most_times_smaller=64),
        ),
        "hybrid": (
            Rung(bits=(8, 8)),
            Rung(bits=(8, 4)),
            Rung(layers_per_code=4, bits=(8, 8), most_times_smaller=5),
            Rung(layers_per_code=4, bits=(5, 5), most_times_smaller=20),
            Rung(layers_per_code=4, bits=(4, 4), most_times_smaller=32),
            Rung(layers_per_code=4, tokens_per_slot=4, bits=(8, 8), most_times_smaller=64),
        ),
        "changing RoPE": (
            Rung(bits=(8, 8)),
            Rung(bits=(8, 4)),
            Rung(bits=(4, 4)),
            Rung(tokens_per_slot=4, bits=(8, 8)),
            Rung(tokens_per_slot=4, bits=(8, 4)),
            Rung(tokens_per_slot=4, bits=(4, 4)),
            Rung(tokens_per_slot=8, bits=(4, 4)),
        ),
    }
)
"""What budgets and the presets 4x, 8x and 16x are composed of, best quality first.

Dense: models where every layer attends or slides; hybrid: those with recurrent layers, whose few
attention layers differ more; changing RoPE: those whose frequencies depend on the length, which
can't rotate rebuilt keys again, so that shared codes would save nothing in memory.

Measured on SmolLM2 (three windows of 1,024 tokens of WikiText-2 test, window 128, codes of groups
of 5 fitted on 24,576 tokens; perplexity, KL; base 20.13): 8 times smaller in 5 bits 20.13, .0034,
in 8 bits 20.18, .0064, with no bits 20.56, .0318; 16 times in 5 bits 20.23, .0136, in 6 bits
20.28, .0171, in 4 bits 20.41, .0148, in 8 bits 20.57, .0321; 29.5 times in 4 bits 20.67, .0406;
31.5 times in 5 bits 21.13, .0580. So a higher rank in fewer bits is better, down to 5, and to 4 for
the smallest. That other models take the same is a guess: no trained hybrid was at hand.
"""


def plan_for_budget(
    anatomy: Anatomy, *, bytes_per_token: float | None = None, times_smaller: float | None = None
) -> Plan:
    """The first rung of the model's ladder whose history fits; see `Plan.for_budget`."""
    plain = plain_history_bytes(anatomy)
    budget = _budget(anatomy, bytes_per_token, times_smaller)
    for rung in _ladder(anatomy):
        if plain / budget <= rung.most_times_smaller * (1 + SLACK):
            plan = _compose(rung, anatomy, budget)
            if plan is not None and history_bytes(plan, anatomy) <= budget * (1 + SLACK):
                plan.check(anatomy)
                return plan
    raise PlanError(
        f"the history must be able to shrink to the budget; got {_words(plain, budget)}; "
        f"{_possible(anatomy)}"
    )


def history_bytes(plan: Plan, anatomy: Anatomy) -> float:
    """Stored bytes of one token of history, over all full-attention layers, in 16 bits.

    Scales of quantised vectors are included. Raises `PlanError` if the plan does not fit.
    """
    with torch.device("meta"):
        pipelines: Iterable[Any] = build_pipelines(plan, anatomy)
    folded = sum(_pipeline_bytes(pipeline) for pipeline in pipelines)
    plain = set(anatomy.foldable_layers) - set(plan.folded_layers)
    return folded + sum(2 * anatomy.layers[layer].kv_width * ELEMENT_SIZE for layer in plain)


def plain_history_bytes(anatomy: Anatomy) -> int:
    """What one token of history costs in the plain cache, in 16 bits.

    Raises `PlanError` for a model without full-attention layers, whose history costs nothing.
    """
    layers = anatomy.foldable_layers
    if not layers:
        raise PlanError(
            "a budget is for the history of full-attention layers, of which the model must have "
            "at least one; it has none; there is nothing to make smaller"
        )
    return sum(2 * anatomy.layers[layer].kv_width * ELEMENT_SIZE for layer in layers)


def operations_left(plan: Plan, anatomy: Anatomy, tokens: int) -> float:
    """The share of the layers' work on a prompt that is left: `s/L + (T/n)(1 - s/L)` under skip.

    tokens: n. s is the plan's split, L the model's layers, T the replay; 1 where nothing is
    skipped. Anchors, and a state projector's scan, are so little that they are left out.
    """
    if plan.prefill != "skip" or plan.split is None:
        return 1.0
    below = plan.split / anatomy.num_layers
    return below + min(1.0, plan.replay / tokens) * (1 - below)


def slot_bytes(parts: Iterable[CodePart], bits: Bits | None) -> int:
    """Stored bytes of one code of these parts, a scale for each quantised vector included."""
    if bits is None:
        return ELEMENT_SIZE * sum(part.heads * part.width for part in parts)
    return sum(
        part.heads * (TurboQuant(part.width, bits.of(part), bits.seed).row_bytes + SCALE_BYTES)
        for part in parts
    )


def layer_groups(layers: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive groups of `size`; a last layer left alone joins the group before it."""
    groups = [list(layers[start : start + size]) for start in range(0, len(layers), size)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups


def _pipeline_bytes(pipeline: Pipeline) -> float:
    return slot_bytes(pipeline.depth.code_parts, pipeline.bits) / pipeline.group


def _ladder(anatomy: Anatomy) -> tuple[Rung, ...]:
    if not anatomy.rope_is_static:
        return LADDERS["changing RoPE"]
    return LADDERS["hybrid" if anatomy.is_hybrid else "dense"]


def _compose(rung: Rung, anatomy: Anatomy, budget: float) -> Plan | None:
    """The rung's plan with the largest ranks that fit, None where no rank does."""
    layers = list(anatomy.foldable_layers)
    axes: dict[str, Any] = {}
    if rung.layers_per_code is not None:
        axes["depth"] = _latent_entries(rung, layers, anatomy, budget)
        axes["resident"] = "shared"  # or regenerated keys and values would take what was saved
        if axes["depth"] is None:
            return None
    if rung.tokens_per_slot > 1:
        pool = {"group": rung.tokens_per_slot, **POOL_GATE}
        axes["sequence"] = [{"method": "pool", "layers": layers, **pool}]
    if rung.bits is not None:
        bits = dict(zip(("key_bits", "value_bits"), rung.bits, strict=True))
        axes["bits"] = [{"method": "turboquant", "layers": layers, **bits}]
    return Plan.from_dict(axes)


def _latent_entries(
    rung: Rung, layers: list[int], anatomy: Anatomy, budget: float
) -> list[dict[str, Any]] | None:
    assert rung.layers_per_code is not None
    entries: list[dict[str, Any]] = []
    share = budget / plain_history_bytes(anatomy)
    for group in layer_groups(layers, rung.layers_per_code):
        width = sum(2 * anatomy.layers[layer].kv_width for layer in group)
        allowed = share * width * ELEMENT_SIZE * rung.tokens_per_slot
        rank = _largest_rank(width, allowed, None if rung.bits is None else Bits(*rung.bits, 0))
        if rank == 0:
            return None
        entries.append({"method": "latent", "layers": group, "rank": rank})
    return entries


def _largest_rank(width: int, allowed: float, bits: Bits | None) -> int:
    """The largest rank up to `width` whose code takes at most `allowed` bytes; 0 if none does."""
    per_value = ELEMENT_SIZE if bits is None else bits.key_bits / 8
    rank = _rounded(min(width, int(allowed * (1 + SLACK) / per_value)))
    while rank > 0 and slot_bytes((CodePart("both", 1, rank),), bits) > allowed * (1 + SLACK):
        rank = _rounded(rank - 1)
    return rank


def _rounded(rank: int) -> int:
    return rank if rank < RANK_MULTIPLE else rank - rank % RANK_MULTIPLE


def _budget(anatomy: Anatomy, bytes_per_token: float | None, times_smaller: float | None) -> float:
    """Bytes a token that are allowed; raises `PlanError` for what is no budget."""
    if (bytes_per_token is None) == (times_smaller is None):
        raise PlanError(
            "a budget is exactly one of bytes_per_token and times_smaller; got "
            f"bytes_per_token={bytes_per_token}, times_smaller={times_smaller}; give one of them"
        )
    name = "times_smaller" if bytes_per_token is None else "bytes_per_token"
    given: Any = times_smaller if bytes_per_token is None else bytes_per_token
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not number or not 0 < given <= sys.float_info.max:
        raise PlanError(
            f"{name} must be a finite number above 0; got {given!r}; {_possible(anatomy)}"
        )
    plain = plain_history_bytes(anatomy)
    budget = float(given) if bytes_per_token is not None else plain / given
    if budget >= plain:
        raise PlanError(
            f"a budget must be below the plain cache's {plain:,} bytes a token, which needs no "
            f"plan; got {_words(plain, budget)}; {_possible(anatomy)}"
        )
    return budget


def _possible(anatomy: Anatomy) -> str:
    """Which budgets the model's ladder reaches, for an error message."""
    plain = plain_history_bytes(anatomy)
    least = plain
    for rung in _ladder(anatomy):
        limit = plain if math.isinf(rung.most_times_smaller) else plain / rung.most_times_smaller
        plan = _compose(rung, anatomy, limit)
        if plan is not None:
            least = min(least, math.ceil(max(limit, history_bytes(plan, anatomy))))
    most = math.floor(10 * plain / least) / 10
    return (
        f"for this model ask for {least:,} to {plain - 1:,} bytes a token, so for up to {most:g} "
        "times smaller"
    )


def _words(plain: int, budget: float) -> str:
    return f"{budget:,.6g} bytes a token ({plain / budget:,.3g} times smaller)"
