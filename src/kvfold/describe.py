"""A plan in one line of words: what it does on each axis, and what its history costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvfold.anatomy import Anatomy
from kvfold.budget import history_bytes, operations_left, plain_history_bytes
from kvfold.plan import Ced, Csa2, DepthEntry, Latent, Plan, Pool, Turboquant

PROMPT = 2048
"""Tokens of the prompt that skipping is told for."""


def describe(plan: Plan, anatomy: Anatomy) -> str:
    """The plan in short, with stored bytes of a token of history and times smaller, in 16 bits.

    As `latent, 6 groups of 5 layers, rank 240 (8.0x), codes in 8 bits: 1,452 bytes a token, 15.9x
    smaller`. Raises `PlanError` if the plan does not fit the model.
    """
    size, plain = history_bytes(plan, anatomy), plain_history_bytes(anatomy)
    parts = [*_depth(plan, anatomy)]
    parts += [_pool(entry, anatomy) for entry in plan.sequence]
    parts += [_bits(entry, plan, anatomy) for entry in plan.bits]
    untouched = len(anatomy.foldable_layers) - len(plan.folded_layers)
    if untouched:
        parts.append(f"{_layers(untouched)} left as {'it is' if untouched == 1 else 'they are'}")
    parts += [*_lora(plan), *_skip(plan, anatomy)]
    smaller = f", {plain / size:.1f}x smaller" if size else ""
    return f"{', '.join(parts)}: {size:,.0f} bytes a token{smaller}"


def _depth(plan: Plan, anatomy: Anatomy) -> Iterable[str]:
    """One phrase for all entries of a method; identity says nothing where another axis acts."""
    entries: dict[str, list[DepthEntry]] = {}
    for entry in plan.depth:
        entries.setdefault(entry.method, []).append(entry)
    for method, alike in entries.items():
        count = sum(len(entry.layers) for entry in alike)
        if method == "latent":
            yield _latent([entry for entry in alike if isinstance(entry, Latent)], anatomy)
        elif method == "csa2":
            forms = {entry.form for entry in alike if isinstance(entry, Csa2)}
            yield f"csa2 ({' and '.join(sorted(forms))}), {_groups(alike)}"
        elif method == "ced":
            splits = {entry.split for entry in alike if isinstance(entry, Ced)}
            yield f"ced, {_layers(count)} from {_states(splits)}"
        elif method == "drop":
            yield f"history of {_layers(count)} dropped"
        elif method != "identity":
            yield f"{method}, {_groups(alike)}"
        elif not plan.sequence and not plan.bits:
            yield f"own keys and values of {_layers(count)}"


def _latent(entries: Sequence[Latent], anatomy: Anatomy) -> str:
    codes = [entry.rank + (entry.value_rank or 0) for entry in entries]
    width = sum(2 * anatomy.layers[layer].kv_width for entry in entries for layer in entry.layers)
    ranks = sorted(set(codes))
    rank = f"rank {ranks[0]:,}" if len(ranks) == 1 else f"ranks {ranks[0]:,} to {ranks[-1]:,}"
    splits = {entry.split for entry in entries if entry.split is not None}
    source = f" from {_states(splits)}" if splits else ""
    return f"latent{source}, {_groups(entries)}, {rank} ({width / sum(codes):.1f}x)"


def _pool(entry: Pool, anatomy: Anatomy) -> str:
    how = "plain mean" if entry.gate == "mean" else f"{entry.gate} gate"
    overlap = ", overlapping" if entry.overlap else ""
    return f"{entry.group} tokens a slot ({how}{overlap}){_where(entry, anatomy)}"


def _bits(entry: Turboquant, plan: Plan, anatomy: Anatomy) -> str:
    shared = {
        layer
        for served in plan.depth
        if isinstance(served, Ced | Latent) and getattr(served, "value_rank", None) is None
        for layer in served.layers
    }
    if set(entry.layers) <= shared:
        what = f"codes in {_number(entry.key_bits)}"
    elif entry.key_bits == entry.value_bits:
        what = f"keys and values in {_number(entry.key_bits)}"
    else:
        what = f"keys in {_number(entry.key_bits)}, values in {entry.value_bits}"
    return what + _where(entry, anatomy)


def _lora(plan: Plan) -> Iterable[str]:
    if plan.lora is not None:
        where = f"{_joined(plan.lora.targets)} of {_layers(len(plan.lora_layers))}"
        yield f"lora of rank {plan.lora.rank:,} on {where}"


def _skip(plan: Plan, anatomy: Anatomy) -> Iterable[str]:
    if plan.prefill != "skip" or plan.split is None:
        return
    first, last = plan.split, anatomy.num_layers - 1
    layers = f"layer {last}" if first == last else f"layers {first}-{last}"
    tokens = "token" if plan.replay == 1 else f"{plan.replay:,} tokens"
    left = operations_left(plan, anatomy, PROMPT)
    yield (
        f"prompts skip {layers} but for the last {tokens} ({100 * left:.0f}% of the work at "
        f"{PROMPT:,})"
    )
    if plan.state_projector:
        yield "states projected"


def _where(entry: Pool | Turboquant, anatomy: Anatomy) -> str:
    total = len(anatomy.foldable_layers)
    return "" if len(entry.layers) == total else f" in {len(entry.layers)} of {total} layers"


def _groups(entries: Sequence[DepthEntry]) -> str:
    sizes = [len(entry.layers) for entry in entries]
    kinds = list(dict.fromkeys(sizes))
    counts = [
        f"{sizes.count(size)} group{'s' * (sizes.count(size) > 1)} of {size}" for size in kinds
    ]
    return f"{_joined(counts)} layer{'s' * (kinds[-1] > 1)}"


def _states(splits: Iterable[int]) -> str:
    return _joined(f"H_{split}" for split in sorted(splits))


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _number(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"


def _joined(names: Iterable[str]) -> str:
    ordered = list(names)
    return " and ".join(filter(None, [", ".join(ordered[:-1]), ordered[-1]]))
