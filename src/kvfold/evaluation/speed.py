"""Prefill and decode speed of folded caches against the plain one, in the same run.

Repeats are interleaved (plain, folded, plain, folded, ...) and medians taken, so that a machine
that slows down for a while slows all of them. Attaching and warming up are not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.evaluation.peak import peak_memory
from kvfold.runtime.attach import AddOnLike, attach
from kvfold.runtime.feeding import cache_argument

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Speed:
    """One cache's speed with `history` tokens before the decoded ones, batch 1.

    cache_bytes: the folded cache's own count after the prefill, in the model's dtype; None for
    the plain cache. peak_bytes: memory that prefill and decode took at their highest, above the
    model's own, the cache included; the median of the repeats, None where it can't be told.
    first_token_seconds: from an empty cache being made to the id of the first new token, the
    prefill included; None where it was not timed.
    """

    history: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    cache_bytes: int | None
    peak_bytes: int | None = None
    first_token_seconds: float | None = None


@dataclass(frozen=True)
class SpeedSettings:
    """history: tokens of the prompt. decode_tokens: steps timed after it. repeats: of it all."""

    history: int = 1024
    decode_tokens: int = 16
    repeats: int = 3


def measure_speed(
    model: Any,
    addons: Mapping[str, AddOnLike | None],
    tokens: Tensor,
    settings: SpeedSettings | None = None,
) -> dict[str, Speed]:
    """Speeds by name; an add-on of None is the plain model.

    tokens: any ids of int64; repeated if they are fewer than the history and the steps need.
    """
    chosen = settings or SpeedSettings()
    needed = chosen.history + chosen.decode_tokens
    flat = tokens.reshape(-1)
    ids = flat.repeat(-(-needed // flat.shape[0]))[None, :needed].to(model.device)
    runs: dict[str, list[_Run]] = {name: [] for name in addons}
    for _ in range(chosen.repeats):
        for name, addon in addons.items():
            runs[name].append(_one_run(model, addon, ids, chosen))
    return {
        name: Speed(
            history=chosen.history,
            prefill_tokens_per_second=chosen.history
            / statistics.median(r.prefill for r in results),
            decode_tokens_per_second=chosen.decode_tokens
            / statistics.median(r.decode for r in results),
            cache_bytes=results[0].cache_bytes,
            peak_bytes=_median_bytes([r.peak_bytes for r in results]),
            first_token_seconds=statistics.median(r.first_token for r in results),
        )
        for name, results in runs.items()
    }


class _Run(NamedTuple):
    """Seconds of one prefill and of all decode steps, bytes, and seconds to the first token."""

    prefill: float
    decode: float
    cache_bytes: int | None
    peak_bytes: int | None
    first_token: float


def _median_bytes(figures: list[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return int(statistics.median(known)) if known else None


@torch.no_grad()
def _one_run(model: Any, addon: AddOnLike | None, ids: Tensor, settings: SpeedSettings) -> _Run:
    with cache_maker(model, addon) as new_cache:
        _feed(model, new_cache(), ids[:, : min(WARM_UP_TOKENS, settings.history)])
        with peak_memory(model.device) as peak:
            empty = _now(model)
            cache = new_cache()
            start = _now(model)
            logits = _feed(model, cache, ids[:, : settings.history])
            filled = _now(model)
            logits[0, -1].argmax().item()
            chosen = _now(model)
            cache_bytes = None if addon is None else cache.nbytes().total
            begin = _now(model)
            for position in range(settings.history, ids.shape[1]):
                _feed(model, cache, ids[:, position : position + 1])
            ended = _now(model)
        first_token = chosen - empty
        return _Run(filled - start, ended - begin, cache_bytes, peak.above_start, first_token)


@contextmanager
def cache_maker(model: Any, addon: AddOnLike | None) -> Iterator[Callable[[], Any]]:
    """Makes empty caches for this model: plain ones for None, else folded, while attached."""
    if addon is None:
        yield lambda: DynamicCache(config=model.config)
        return
    with attach(model, addon) as attachment:
        yield attachment.new_cache


def _feed(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """The last token's logits: (1, 1, vocab)."""
    named = {cache_argument(model): cache}
    logits: Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=1, **named).logits
    return logits


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
