"""Plans by name, made to fit any supported model.

The numbers that decide what a preset costs stand at the top; those of 4x, 8x and 16x are the table
`LADDERS` in `kvfold.budget`. The upper half of a model starts at layer `num_layers // 2`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from kvfold.anatomy import Anatomy
from kvfold.budget import POOL_GATE, layer_groups, plan_for_budget
from kvfold.errors import PlanError
from kvfold.plan import Plan

GROUP_DENSE = 5
"""Layers of a group where every layer attends."""

GROUP_HYBRID = 4
"""Attention layers of a group in hybrids, whose few attention layers differ more."""

LATENT_TIMES_SMALLER = 10

BALANCED_GROUP_DENSE = 5
BALANCED_TIMES_SMALLER_DENSE = 8
"""Measured on SmolLM2 (results/depth): perplexity 27.56 with a window of 128, base 27.61; groups
of 10 are no better there and have twice the weights to read at each decode step.
"""
BALANCED_TIMES_SMALLER_HYBRID = 6
"""Small enough to be absorbed on Qwen3.5's shape; not yet measured on a trained hybrid."""

FAST_PREFILL_PART_DENSE = 11 / 15
"""Where `fast-prefill` splits a dense model. Measured on SmolLM2 (results/prefill): the lowest
split tried that costs less than 3% of perplexity after 2,048 tokens (22 of 30: 2.1%, 20: 4.2%)."""
FAST_PREFILL_PART_HYBRID = 1 / 2
"""The first card's; the split then moves up to the next layer that attends. A linear map of the
state just below that layer gives its values as they are and its keys nearly so; of a state one
linear-attention layer lower it does not. On the tiny hybrid copying falls from 100% to 84% after
512 words and to 76% after 1,024, with 256 replayed (results/prefill)."""
FAST_PREFILL_REPLAY = 256
"""Also the window: tokens that have run through all layers anyway are kept as they are."""

RANK_MULTIPLE = 16

POOL_GROUP = 4

CARD_LAYERS = 32
CARD_ATTENTION_LAYERS = tuple(range(3, 32, 4))
CARD_SPLIT = 16
CARD_SOURCE = 19
CARD_READERS = (23, 27, 31)
CARD_RESIDUAL_HIDDEN = 1536

COMPRESS_CARD_PERIOD = 4
COMPRESS_CARD_PLACE = 3
COMPRESS_CARD_GROUP = 4
COMPRESS_CARD_WINDOW = 128
"""The second card's: layers i with i % 4 == 3, `ratio` and `window_size`."""


def preset(name: str, anatomy: Anatomy) -> Plan:
    """The plan of that name for a model; `PRESETS` lists the names.

    Raises `PlanError` for an unknown name or a model with too few full-attention layers.
    """
    make = PRESETS.get(name)
    if make is None:
        raise PlanError(f"a preset is one of {', '.join(PRESETS)}; got {name!r}")
    plan = make(anatomy)
    plan.check(anatomy)
    return plan


def _ced(anatomy: Anatomy) -> Plan:
    """Every upper layer from the hidden state at the middle."""
    layers = _upper_layers(anatomy, "ced", at_least=1)
    return _plan({"method": "ced", "split": _middle(anatomy), "layers": layers})


def _csa2(anatomy: Anatomy) -> Plan:
    """The upper layers in groups, each read from its first layer."""
    layers = _upper_layers(anatomy, "csa2", at_least=2)
    groups = layer_groups(layers, _group_size(anatomy))
    return _plan(
        *({"method": "csa2", "source": group[0], "readers": group[1:]} for group in groups)
    )


def _ced_csa2(anatomy: Anatomy) -> Plan:
    """The first card: one source layer from the hidden state, the layers above read from it."""
    if _has_card_shape(anatomy):
        return _card()
    source, *readers = _upper_layers(anatomy, "ced-csa2", at_least=2)
    return _plan(
        {"method": "ced", "split": _middle(anatomy), "layers": [source]},
        {"method": "csa2", "source": source, "readers": readers},
    )


def _fast_prefill(anatomy: Anatomy) -> Plan:
    """Prompts skip the upper layers, whose history comes from the hidden state at the split."""
    part = FAST_PREFILL_PART_HYBRID if anatomy.is_hybrid else FAST_PREFILL_PART_DENSE
    least = round(anatomy.num_layers * part)
    layers = [layer for layer in anatomy.foldable_layers if layer >= least]
    _require(layers, "fast-prefill", f"the layers from {least} on", at_least=1)
    split = layers[0]
    return _plan(
        {"method": "ced", "split": split, "layers": layers},
        window=FAST_PREFILL_REPLAY,
        prefill="skip",
        replay=FAST_PREFILL_REPLAY,
        state_projector=any(n.kind == "linear_attention" for n in anatomy.layers[split:]),
    )


def _card() -> Plan:
    ced = {
        "method": "ced",
        "split": CARD_SPLIT,
        "layers": [CARD_SOURCE],
        "bias": False,
        "normalize": False,
    }
    csa2 = {
        "method": "csa2",
        "source": CARD_SOURCE,
        "readers": list(CARD_READERS),
        "form": "separate",
        "bias": False,
        "residual_hidden": CARD_RESIDUAL_HIDDEN,
    }
    return _plan(ced, csa2, anchors=0, window=0)


def _latent(anatomy: Anatomy) -> Plan:
    """One code for all upper layers."""
    layers = _upper_layers(anatomy, "latent", at_least=1)
    return _plan(_latent_entry(anatomy, layers, LATENT_TIMES_SMALLER))


def _balanced(anatomy: Anatomy) -> Plan:
    """Every attention layer of the model, in groups with a code each."""
    layers = list(anatomy.foldable_layers)
    _require(layers, "balanced", "the model", at_least=1)
    if anatomy.is_hybrid:
        size, smaller = GROUP_HYBRID, BALANCED_TIMES_SMALLER_HYBRID
    else:
        size, smaller = BALANCED_GROUP_DENSE, BALANCED_TIMES_SMALLER_DENSE
    return _plan(*(_latent_entry(anatomy, group, smaller) for group in layer_groups(layers, size)))


def _identity(anatomy: Anatomy) -> Plan:
    """Every attention layer keeps its own history: the exact no-op."""
    layers = list(anatomy.foldable_layers)
    _require(layers, "identity", "the model", at_least=1)
    return _plan({"method": "identity", "layers": layers})


def _times_smaller(anatomy: Anatomy, times: int) -> Plan:
    """Every attention layer composed so that the history is at least so many times smaller."""
    _require(list(anatomy.foldable_layers), f"{times}x", "the model", at_least=1)
    return plan_for_budget(anatomy, times_smaller=times)


def _turboquant(anatomy: Anatomy, key_bits: int, value_bits: int) -> Plan:
    """Every attention layer's own keys and values in so many bits; nothing is trained."""
    layers = list(anatomy.foldable_layers)
    _require(layers, f"k{key_bits}v{value_bits}", "the model", at_least=1)
    entry = {"layers": layers, "key_bits": key_bits, "value_bits": value_bits}
    return Plan.from_dict({"bits": [{"method": "turboquant", **entry}]})


def _pool(anatomy: Anatomy) -> Plan:
    """Every attention layer's tokens pooled to slots."""
    layers = list(anatomy.foldable_layers)
    _require(layers, "pool", "the model", at_least=1)
    entry = {"group": POOL_GROUP, **POOL_GATE}
    return Plan.from_dict({"sequence": [{"method": "pool", "layers": layers, **entry}]})


def _qwen_compress(anatomy: Anatomy) -> Plan:
    """The second card: every fourth layer pooled by one score a token, no anchors."""
    period, place = COMPRESS_CARD_PERIOD, COMPRESS_CARD_PLACE
    layers = [layer for layer in anatomy.foldable_layers if layer % period == place]
    _require(
        layers,
        "qwen-compress",
        f"layers {place}, {place + period}, ... (i % {period} == {place})",
        at_least=1,
    )
    entry = {
        "method": "pool",
        "layers": layers,
        "group": COMPRESS_CARD_GROUP,
        "gate": "token",
        "overlap": False,
        "mass_bias": False,
        "position": "mean",
    }
    settings = {"anchors": 0, "window": COMPRESS_CARD_WINDOW, "prefill_attention": "folded"}
    return Plan.from_dict({"sequence": [entry], **settings})


PRESETS: Mapping[str, Callable[[Anatomy], Plan]] = MappingProxyType(
    {
        "balanced": _balanced,
        "4x": partial(_times_smaller, times=4),
        "8x": partial(_times_smaller, times=8),
        "16x": partial(_times_smaller, times=16),
        "k8v8": partial(_turboquant, key_bits=8, value_bits=8),
        "k8v4": partial(_turboquant, key_bits=8, value_bits=4),
        "k4v4": partial(_turboquant, key_bits=4, value_bits=4),
        "k4v2": partial(_turboquant, key_bits=4, value_bits=2),
        "pool": _pool,
        "qwen-compress": _qwen_compress,
        "latent": _latent,
        "ced": _ced,
        "csa2": _csa2,
        "ced-csa2": _ced_csa2,
        "fast-prefill": _fast_prefill,
        "identity": _identity,
    }
)
"""Each preset's name and what makes its plan."""


def _plan(*depth: dict[str, Any], **settings: Any) -> Plan:
    return Plan.from_dict({"depth": list(depth), **settings})


def _middle(anatomy: Anatomy) -> int:
    return anatomy.num_layers // 2


def _group_size(anatomy: Anatomy) -> int:
    return GROUP_HYBRID if anatomy.is_hybrid else GROUP_DENSE


def _upper_layers(anatomy: Anatomy, name: str, *, at_least: int) -> list[int]:
    layers = [layer for layer in anatomy.foldable_layers if layer >= _middle(anatomy)]
    _require(layers, name, f"the model's upper half (from layer {_middle(anatomy)})", at_least)
    return layers


def _require(layers: list[int], name: str, where: str, at_least: int) -> None:
    if len(layers) < at_least:
        raise PlanError(
            f"the preset {name} needs at least {at_least} full-attention layers in {where}; it "
            f"has {len(layers)}: {layers}; choose another preset, or write a plan"
        )


def _latent_entry(anatomy: Anatomy, layers: list[int], times_smaller: int) -> dict[str, Any]:
    width = 2 * sum(anatomy.layers[layer].kv_width for layer in layers)
    multiples = round(width / times_smaller / RANK_MULTIPLE)
    return {
        "method": "latent",
        "layers": layers,
        "rank": min(width, max(1, multiples) * RANK_MULTIPLE),
    }


def _has_card_shape(anatomy: Anatomy) -> bool:
    return (
        anatomy.is_hybrid
        and anatomy.num_layers == CARD_LAYERS
        and anatomy.foldable_layers == CARD_ATTENTION_LAYERS
    )
