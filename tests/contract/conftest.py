"""What the contract suite runs over: every method on every architecture, with random weights.

Long because it is one file: test files are not importable from each other.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from kvfold.anatomy import Anatomy, anatomy, attention_module
from kvfold.methods import (
    Lora,
    StateProjector,
    build_lora,
    build_pipelines,
    build_state_projector,
)
from kvfold.plan import Plan
from kvfold.runtime.attach import Attachment, attach
from kvfold.runtime.cache import FoldedCache
from kvfold.runtime.slots import SlotStore

from ..storages import allocated

Layers = tuple[int, ...]
Axes = dict[str, Any]
"""A plan's entries by axis, and its lora."""


@pytest.fixture(autouse=True)
def rings_grow_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of a few places grow like long ones: each contract must hold while they do."""
    monkeypatch.setattr("kvfold.runtime.schedule.FIRST_PLACES", 4)


def _depth(*entries: dict[str, Any]) -> Axes:
    return {"depth": list(entries)}


def _csa2(layers: Layers, **settings: Any) -> dict[str, Any]:
    """The first layer feeds all others."""
    return {"method": "csa2", "source": layers[0], "readers": layers[1:], **settings}


def _ced(layers: Layers, split: int) -> dict[str, Any]:
    return {"method": "ced", "split": split, "layers": layers}


def _latent(layers: Layers, **settings: Any) -> dict[str, Any]:
    return {"method": "latent", "layers": layers, "rank": 24, **settings}


def _pool(layers: Layers, **settings: Any) -> Axes:
    return {"sequence": [{"method": "pool", "layers": layers, **settings}]}


def _bits(layers: Layers, keys: int, values: int) -> Axes:
    entry = {"method": "turboquant", "layers": layers, "key_bits": keys, "value_bits": values}
    return {"bits": [entry]}


def _every_fourth(layers: Layers) -> Layers:
    """The second card's rule; the last layer of a model where no full attention follows it."""
    return tuple(layer for layer in layers if layer % 4 == 3) or layers[-1:]


def _mixed(layers: Layers) -> Axes:
    """Three groups in one cache: by four, by two and quantised, and only quantised."""
    by_four, others = layers[0::3], tuple(n for n in layers if n not in layers[0::3])
    four = _pool(by_four, gate="head", overlap=True)["sequence"]
    two = _pool(layers[1::3], group=2)["sequence"]
    return {"sequence": four + two, **_bits(others, 8, 4)}


def _two_codes(layers: Layers) -> Axes:
    """A quantised code of one group size beside a pooled one of another."""
    first, rest = layers[:1], layers[1:]
    depth = _depth(_ced(first, min(1, layers[0])), _latent(rest))
    return {**depth, **_pool(rest, group=2, gate="head"), **_bits(first, 8, 4)}


METHODS: dict[str, Callable[[Layers], Axes]] = {
    "identity": lambda ls: _depth({"method": "identity", "layers": ls}),
    "drop": lambda ls: _depth({"method": "drop", "layers": ls}),
    "ced": lambda ls: _depth(_ced(ls, min(ls))),
    "ced-one-layer": lambda ls: _depth(_ced(ls[-1:], 1)),
    "csa2-joint": lambda ls: _depth(_csa2(ls)),
    "csa2-separate": lambda ls: _depth(_csa2(ls, form="separate")),
    "csa2-residual": lambda ls: _depth(_csa2(ls, residual_hidden=12)),
    "ced-csa2": lambda ls: _depth(_ced(ls[:1], min(1, ls[0])), _csa2(ls)),
    "latent": lambda ls: _depth(_latent(ls)),
    "latent-two-codes": lambda ls: _depth(_latent(ls, rank=12, value_rank=8)),
    "latent-of-hidden": lambda ls: _depth(_latent(ls, rank=20, split=min(ls))),
}
"""The depth axis alone, by name: from a model's foldable layers to a plan's entries."""

COMPOSITIONS: dict[str, Callable[[Layers], Axes]] = {
    "drop-4": lambda ls: _depth({"method": "drop", "layers": ls, "group": 4}),
    "pool-mean": lambda ls: _pool(ls, gate="mean", mass_bias=False),
    "pool-mean-overlap-3": lambda ls: _pool(ls, gate="mean", group=3, overlap=True),
    "pool-token": lambda ls: _pool(ls),
    "pool-token-8-last": lambda ls: _pool(ls, group=8, position="last"),
    "pool-token-overlap": lambda ls: _pool(ls, overlap=True, mass_bias=False),
    "pool-head": lambda ls: _pool(ls, gate="head"),
    "pool-head-overlap": lambda ls: _pool(ls, gate="head", overlap=True),
    "pool-channel-2": lambda ls: _pool(ls, gate="channel", group=2, gate_rank=5),
    "pool-channel-overlap-first": lambda ls: _pool(
        ls, gate="channel", overlap=True, position="first", gate_rank=5
    ),
    "every-fourth": lambda ls: _pool(_every_fourth(ls)),
    "mixed": _mixed,
    "turboquant-k8v4": lambda ls: _bits(ls, 8, 4),
    "turboquant-k8v8": lambda ls: _bits(ls, 8, 8),
    "turboquant-k4v4": lambda ls: _bits(ls, 4, 4),
    "turboquant-k4v2": lambda ls: _bits(ls, 4, 2),
    "latent+pool": lambda ls: {**_depth(_latent(ls)), **_pool(ls)},
    "latent-of-hidden+pool": lambda ls: {
        **_depth(_latent(ls, split=min(ls))),
        **_pool(ls, gate="channel", gate_rank=5),
    },
    "csa2+pool-head": lambda ls: {**_depth(_csa2(ls)), **_pool(ls, gate="head", overlap=True)},
    "ced+pool": lambda ls: {**_depth(_ced(ls, min(ls))), **_pool(ls)},
    "ced-csa2+pool": lambda ls: {
        **_depth(_ced(ls[:1], min(1, ls[0])), _csa2(ls)),
        **_pool(ls, overlap=True),
    },
    "pool+k8v4": lambda ls: {**_pool(ls), **_bits(ls, 8, 4)},
    "pool-head-overlap+k4v2": lambda ls: {
        **_pool(ls, gate="head", overlap=True),
        **_bits(ls, 4, 2),
    },
    "latent+k8v4": lambda ls: {**_depth(_latent(ls)), **_bits(ls, 8, 4)},
    "csa2+k4v2": lambda ls: {**_depth(_csa2(ls)), **_bits(ls, 4, 2)},
    "latent+pool+k8v4": lambda ls: {**_depth(_latent(ls)), **_pool(ls), **_bits(ls, 8, 4)},
    "csa2+pool+k4v4": lambda ls: {**_depth(_csa2(ls)), **_pool(ls), **_bits(ls, 4, 4)},
    "two-codes": _two_codes,
    "latent+pool+k8v4+lora": lambda ls: {
        **_depth(_latent(ls)),
        **_pool(ls),
        **_bits(ls, 8, 4),
        "lora": {"rank": 3},
    },
    "ced-csa2+lora-qkvo": lambda ls: {
        **_depth(_ced(ls[:1], min(1, ls[0])), _csa2(ls)),
        "lora": {"rank": 2, "targets": ["q", "k", "v", "o"]},
    },
}
"""The other axes, alone and together."""

ALL = {**METHODS, **COMPOSITIONS}


def _upper(layers: Layers) -> tuple[Layers, int]:
    """The layers that a prompt skips, and the split below them.

    The upper half of a dense model; all attention layers of a hybrid, with a linear one between
    the split and the first of them.
    """
    if layers[0] == 0:
        return layers[len(layers) // 2 :], layers[len(layers) // 2]
    return layers, layers[0] - 1


def _skipped_ced(ls: Layers) -> Axes:
    upper, split = _upper(ls)
    return _depth(_ced(upper, split))


def _skipped_csa2(ls: Layers) -> Axes:
    upper, split = _upper(ls)
    return _depth(_ced(upper[:1], split), _csa2(upper))


def _skipped_latent(ls: Layers) -> Axes:
    upper, split = _upper(ls)
    return _depth(_latent(upper, split=split))


def _over_lower(ls: Layers) -> Axes:
    """Upper layers from H_s, and lower ones folded in ways of their own."""
    upper, split = _upper(ls)
    rest, last = (upper[:-1], upper[-1:]) if len(upper) > 1 else (upper, ())
    lower = tuple(n for n in ls if n < split)
    depth = [_ced(rest, split - 1)]
    pools = _pool(rest, group=3, gate="head")["sequence"]
    if lower:
        depth.append(_latent(lower[:2]))
        pools += _pool(lower[:2], group=2)["sequence"]
    if last:
        depth.append(_ced(last, split))
    bits = _bits(lower[2:], 8, 4) if lower[2:] else {}
    return {**_depth(*depth), **bits, "sequence": pools}


SKIPPED: dict[str, Callable[[Layers], Axes]] = {
    "ced": _skipped_ced,
    "ced-csa2": _skipped_csa2,
    "latent": _skipped_latent,
    "ced+pool": lambda ls: {**_skipped_ced(ls), **_pool(_upper(ls)[0])},
    "ced-csa2+pool-overlap-3": lambda ls: {
        **_skipped_csa2(ls),
        **_pool(_upper(ls)[0], group=3, gate="head", overlap=True),
    },
    "ced-csa2+k8v4": lambda ls: {**_skipped_csa2(ls), **_bits(_upper(ls)[0], 8, 4)},
    "latent+pool+k8v4": lambda ls: {
        **_skipped_latent(ls),
        **_pool(_upper(ls)[0], position="last"),
        **_bits(_upper(ls)[0], 8, 4),
    },
    "ced-csa2+lora": lambda ls: {**_skipped_csa2(ls), "lora": {"rank": 3, "layers": ls}},
    "over-lower": _over_lower,
}
"""Plans under which prompts may skip the upper layers."""
NON_LINEAR = ("csa2-residual",)
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3",
    "smollm3",
    "phi3",
)
SKIPPING_FAMILIES = tuple(family for family in FAMILIES if family != "gemma3")
"""All but those with layers of a sliding window."""
READINGS = ("expanded", "shared", "absorbed")
WITHOUT_EXPERTS = tuple(family for family in FAMILIES if not family.endswith("_moe"))
FAMILIES_APART = 3
"""Families between two that a composition meets; prime to 8, so that all families come up."""


def needs_window(method: str) -> bool:
    """Whether some token of the method can't see itself through its slot."""
    axes = ALL[method]((3, 7, 11))
    late = [
        entry["method"] == "drop" or (entry["method"] == "latent" and "split" not in entry)
        for entry in axes.get("depth", ())
    ]
    return any(late) or "sequence" in axes


def families_of(method: str) -> tuple[str, ...]:
    """All families for a depth method; for a composition three, other ones for each.

    The product of everything would take an hour. The law itself, padding and the dense reference
    are tested on every family for every composition (`every_family`), with experts too, which
    folding never sees.
    """
    if method in METHODS:
        return FAMILIES
    first = list(COMPOSITIONS).index(method)
    count = len(WITHOUT_EXPERTS)
    return tuple(WITHOUT_EXPERTS[(first + FAMILIES_APART * n) % count] for n in range(3))


def _parameters(rows: list[dict[str, str]], names: list[str], *, all_families: bool) -> list[Any]:
    """Values of a test's arguments, one list for each row.

    all_families: where a method meets more families than the three that a composition does, four
    of them are for every day, others for each method, and the rest are `slow`.
    """
    order = [*ALL, *SKIPPED]
    made = []
    for row in rows:
        first = order.index(row["method"])
        daily = {FAMILIES[(first + FAMILIES_APART * n) % len(FAMILIES)] for n in range(4)}
        rare = all_families and row["arch"] and row["arch"] not in daily
        marks = [pytest.mark.slow] if rare else []
        made.append(pytest.param(*(row[name] for name in names), marks=marks))
    return made


def splits_of(method: str, arch: str, length: int) -> range:
    """Where a text is split: everywhere on three families, at every fifth token on the others.

    The three are others for each method, and so is the fifth for each family.
    """
    first = list(ALL).index(method)
    count = len(WITHOUT_EXPERTS)
    three = {WITHOUT_EXPERTS[(first + FAMILIES_APART * n) % count] for n in range(3)}
    return (
        range(1, length + 1)
        if arch in three
        else range(1 + FAMILIES.index(arch) % 5, length + 1, 5)
    )


def readings_of(method: str) -> tuple[str, ...]:
    """Readings that differ: there is something to absorb only where maps are linear."""
    own = method in COMPOSITIONS and "depth" not in COMPOSITIONS[method]((3, 7, 11))
    return READINGS[:2] if own or method in NON_LINEAR else READINGS


@dataclass
class RandomAddOn:
    """A plan with random weights of moderate size: no fit, so that every part shows."""

    plan: Plan
    pipelines: nn.ModuleList
    state_projector: StateProjector | None = None
    lora: Lora | None = None

    def check_base(self, model: Any) -> None:
        """Any model will do."""


def random_addon(model: Any, plan: Plan, seed: int = 0) -> RandomAddOn:
    """Weights drawn so that regenerated keys and values are about as large as their inputs."""
    pipelines = build_pipelines(plan, anatomy(model))
    projector = build_state_projector(plan, anatomy(model))
    generator = torch.Generator().manual_seed(seed)
    lora = build_lora(plan, anatomy(model))
    parts = (part for part in (pipelines, projector, lora) if part is not None)
    weights = [weight for part in parts for weight in part.parameters()]
    for parameter in weights:
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
        drawn = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
        parameter.data = drawn.to(model.dtype)
    return RandomAddOn(plan, pipelines, projector, lora)


@dataclass
class Case:
    """One method on one model, with helpers that the contracts share."""

    model: Any
    plan: Plan
    addon: RandomAddOn

    @property
    def anatomy(self) -> Anatomy:
        """Of the model."""
        return anatomy(self.model)

    @cached_property
    def plain(self) -> Any:
        """The model without folding, low-rank terms (if any) merged into a copy's weights."""
        if self.addon.lora is None:
            return self.model
        merged = deepcopy(self.model)
        for layer, name, term in self.addon.lora.terms():
            module, start = self.anatomy.family.rows(attention_module(merged, layer), name)
            rows = module.weight[start : start + term.b.shape[0]]
            with torch.no_grad():
                rows += term.scale * term.b @ term.a
        return merged

    @property
    def largest_group(self) -> int:
        """Tokens of the longest slot."""
        return max(self.plan.group_of(layer) for layer in self.plan.folded_layers)

    def attach(self, **changes: Any) -> Attachment:
        """Attach, with some of the plan's keys changed."""
        return attach(self.model, self.addon, plan=self.plan.replace(**changes))

    def run(self, ids: Tensor, cache: FoldedCache, mask: Tensor | None = None) -> Tensor:
        """Logits of the new columns, (batch, seq, vocabulary)."""
        return run(self.model, ids, cache, mask)


def run(model: Any, ids: Tensor, cache: Any = None, mask: Tensor | None = None) -> Tensor:
    """Logits, with the cache given under whichever name this transformers knows."""
    named = {} if cache is None else {cache_name(): cache}
    with torch.no_grad():
        logits: Tensor = model(ids, attention_mask=mask, **named).logits
    return logits


def last(model: Any, ids: Tensor, cache: Any = None, mask: Tensor | None = None) -> Tensor:
    """Logits of the last column, (batch, 1, vocabulary)."""
    named = {} if cache is None else {cache_name(): cache}
    with torch.no_grad():
        logits: Tensor = model(ids, attention_mask=mask, logits_to_keep=1, **named).logits
    return logits


def cache_argument(cache: Any) -> dict[str, Any]:
    """The cache as an argument of a model's forward or of generate."""
    return {cache_name(): cache}


def cache_name() -> str:
    """The name of the cache argument in this transformers."""
    import inspect

    from transformers import LlamaForCausalLM

    names = inspect.signature(LlamaForCausalLM.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def tokens(count: int, rows: int = 1, seed: int = 7) -> Tensor:
    """Random token ids, (rows, count), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (rows, count), generator=generator)


@pytest.fixture(scope="session")
def case(tiny_model: Callable[..., Any]) -> Callable[..., Case]:
    """`case(family, method, **plan)`: a tiny model with a random add-on of that method."""
    models: dict[tuple[str, torch.dtype], Any] = {}

    def make(family: str, method: str, *, dtype: torch.dtype = torch.float64, **keys: Any) -> Case:
        if (family, dtype) not in models:
            models[family, dtype] = tiny_model(family, dtype=dtype)
        model = models[family, dtype]
        methods = SKIPPED if keys.get("prefill") == "skip" else ALL
        axes = methods[method](anatomy(model).foldable_layers)
        plan = Plan.from_dict({"anchors": 4, "window": 8, **keys, **axes})
        return Case(model, plan, random_addon(model, plan))

    return make


SAME = 2e-3
"""Allowed difference, relative to the largest value, of two orders of the same computation.

Tensors are float64, but the norms of most models and the whole of a Gated DeltaNet compute in
float32, and random weights amplify its rounding; a wrong position, mask or slot shows as 0.1 or
more.
"""
FLIPPED = 5e-2
"""The same where a stored code differs: a coordinate at the border of two levels falls on one side
in one order of the computation and on the other in another, and then moves by a whole level. That
takes rounding of float32's size, which only models with a Gated DeltaNet have; measured over 4
texts of 60 tokens, flips moved logits by 6e-4 with 8 bits and by 3e-2 with values in 2 bits."""
FEW = 0.01
"""The largest share of codes that may differ so, or one code; 0.7% were the most in those texts.
Without a Gated DeltaNet none may. A fault changes most of them."""


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = SAME) -> None:
    """Equal up to the rounding of the models' own float32 parts."""
    assert ours.shape == theirs.shape
    scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(ours / scale, theirs / scale, atol=tolerance, rtol=0)


class State(NamedTuple):
    """What one row of a cache holds: values as they are, and quantised vectors.

    noisy: whether layers of the model compute in float32 whatever its dtype.
    """

    noisy: bool
    values: list[Tensor]
    quantised: list[tuple[Tensor, Tensor]]


def state(cache: FoldedCache, row: int = 0) -> State:
    """Everything that a row's past has put into a cache: exact places, slots, and what waits."""
    noisy = any(getattr(layer, "conv_states", None) is not None for layer in cache.layers)
    found = State(noisy, [], [])
    seen, one = cache.rows[row], slice(row, row + 1)
    for index in sorted(cache.folded):
        layer = cache.folded_layer(index)
        fold, schedule = layer.fold, layer.schedule
        made, fixed = schedule.made(seen), layer.exact_places
        slots = made if fold.expands_early else schedule.slots(seen)
        for tensor in (layer.keys, layer.values):
            found.values.append(tensor[one, :, : min(seen, schedule.exact_size)])
            if fold.reading == "expanded" and "slot_keys" not in layer.stores:
                found.values.append(tensor[one, :, fixed : fixed + slots])
        for held in layer.stores.values():
            _add_slots(found, held, one, made)
    for store in cache.stores.values():
        made, beyond = store.schedule.made(seen), max(0, seen - store.schedule.anchors)
        for held in store.slots.stores if store.keep else ():
            _add_slots(found, held, one, made)
        if store.partial is not None:
            found.values.append(store.partial[one, :, : min(beyond, store.partial_size)])
        if store.pending is not None:
            found.values.append(store.pending[one, :, : min(made, store.pending.shape[2])])
    return found


def _add_slots(found: State, held: SlotStore, row: slice, count: int) -> None:
    if held.values is None or count == 0:
        return
    values = held.values[row, :, :count]
    if held.scales is None:
        found.values.append(values)
    else:
        found.quantised.append((values, held.scales[row, :, :count]))


def flips(ours: State, theirs: State) -> int:
    """How many bytes of codes differ: few, and no scale without its vector's codes.

    As a share, bytes that differ are no fewer than codes that differ.
    """
    differing = total = 0
    for (codes, scales), (other_codes, other_scales) in zip(
        ours.quantised, theirs.quantised, strict=True
    ):
        assert codes.shape == other_codes.shape
        changed = codes != other_codes
        differing += int(changed.sum())
        total += codes.numel()
        kept = ~changed.any(dim=-1, keepdim=True)
        close = torch.isclose(scales.double(), other_scales.double(), rtol=2 * SAME, atol=1e-6)
        assert bool((close | ~kept).all())
    allowed = max(1, FEW * total) if ours.noisy else 0
    assert differing <= allowed, f"{differing} of {total} bytes of codes differ"
    return differing


def assert_same_state(ours: State, theirs: State) -> int:
    """Two orders of one computation leave the same; returns how many codes flipped on the way."""
    flipped = flips(ours, theirs)
    for mine, other in zip(ours.values, theirs.values, strict=True):
        assert_same(mine, other, FLIPPED if flipped else SAME)
    return flipped


PAD = 5
"""Not the models' own, whose embedding is zero: an unmasked pad would not show."""


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of ids, (1, n) each, aligned to the right, and their attention mask."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - row.shape[1] :] = row[0]
        mask[index, longest - row.shape[1] :] = 1
    return ids, mask


@pytest.fixture(scope="session")
def helpers() -> Any:
    """What contracts share."""
    from types import SimpleNamespace

    return SimpleNamespace(
        run=run,
        last=last,
        padded=padded,
        storages=allocated,
        assert_same=assert_same,
        assert_same_state=assert_same_state,
        state=state,
        tolerance=lambda flipped: FLIPPED if flipped else SAME,
        tokens=tokens,
        cache_name=cache_name,
        random_addon=random_addon,
        families=FAMILIES,
        families_of=families_of,
        splits_of=splits_of,
        methods=tuple(METHODS),
        cache_argument=cache_argument,
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the suite's markers."""
    for line in (
        "every_family: run each composition on every family, not on three",
        "one_family: run each composition on one family, not on three",
        "on_families(*names): only these; compositions without a depth method on one of them",
        "compositions: leave out methods of the depth axis alone",
        "quantised: only methods of the bits axis",
        "unquantised: leave out methods of the bits axis",
        "without_window: leave out methods that need a window",
        "from_codes: leave out expanded reading",
        "skipping: plans under which prompts skip the upper layers, and families that can",
    ):
        config.addinivalue_line("markers", line)


def _left_out(method: str, marked: set[str]) -> bool:
    """Whether a test's marks leave a method out."""
    quantised = "bits" in ALL[method]((3, 7, 11))
    return (
        ("compositions" in marked and method in METHODS)
        or ("quantised" in marked and not quantised)
        or ("unquantised" in marked and quantised)
        or ("without_window" in marked and needs_window(method))
    )


def _families(method: str, definition: Any, marked: set[str]) -> tuple[str, ...]:
    """The families that a test meets a method on."""
    if "on_families" in marked:
        named: tuple[str, ...] = definition.get_closest_marker("on_families").args
        alone = method in COMPOSITIONS and "absorbed" not in readings_of(method)
        return named if not alone else (named[list(COMPOSITIONS).index(method) % len(named)],)
    if method in METHODS or "every_family" in marked:
        return FAMILIES
    return families_of(method)[: 1 if "one_family" in marked else 3]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise by the names of a test's arguments, those together that a method decides."""
    marked = {mark.name for mark in metafunc.definition.iter_markers()}
    marks = metafunc.definition.iter_markers("parametrize")
    named = (mark.args[0] for mark in marks)
    own = {name for names in named for name in ([names] if isinstance(names, str) else names)}
    if "skipping" in marked:
        choices = {"method": list(SKIPPED), "arch": list(SKIPPING_FAMILIES)}
        free = [n for n in choices if n in metafunc.fixturenames and n not in own]
        if len(free) == 2:
            pairs = [{"method": m, "arch": f} for m in SKIPPED for f in SKIPPING_FAMILIES]
            metafunc.parametrize(free, _parameters(pairs, free, all_families=True))
        elif free:
            metafunc.parametrize(free[0], choices[free[0]])
        return
    free = [n for n in ("arch", "method", "reading") if n in metafunc.fixturenames and n not in own]
    if "method" not in free:
        for name in free:
            metafunc.parametrize(name, FAMILIES if name == "arch" else READINGS)
        return
    rows = [
        {"arch": family, "method": method, "reading": reading}
        for method in ALL
        if not _left_out(method, marked)
        for family in (_families(method, metafunc.definition, marked) if "arch" in free else [""])
        for reading in (readings_of(method) if "reading" in free else [""])
        if not ("from_codes" in marked and reading == "expanded")
    ]
    made: list[Any] = []
    for method in ALL:
        own_rows = [row for row in rows if row["method"] == method]
        many = method in METHODS or "every_family" in marked
        made += _parameters(own_rows, free, all_families=many and "on_families" not in marked)
    metafunc.parametrize(free, made)
