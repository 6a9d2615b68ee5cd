"""Rows that join a batch in the middle of it and leave it again go on as they would alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.errors import CacheError
from kvfold.runtime.joining import is_joinable, join_rows, select_rows

LENGTHS = (7, 30, 41)
STEPS = 5
CASES = [
    ("llama", "latent+pool+k8v4"),
    ("qwen2", "pool-head-overlap"),
    ("qwen3", "ced-csa2"),
    ("qwen3_5", "pool+k8v4"),
    ("qwen3_5", "ced-csa2"),
    ("gemma3", "latent"),
    ("smollm3", "mixed"),
]
"""What a cache can hold, each once: folded layers beside plain, sliding and recurrent ones."""


def masked_step(
    model: Any, helpers: Any, cache: Any, ids: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Logits of one more token a row, (rows, vocabulary)."""
    columns = max(lengths) + 1
    seen = torch.tensor(lengths)[:, None]
    mask = (torch.arange(columns) >= columns - 1 - seen).long()
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(ids)[:, None],
            attention_mask=mask,
            position_ids=seen,
            **helpers.cache_argument(cache),
        )
    logits: Tensor = output.logits[:, -1]
    return logits


def check_rows(model: Any, helpers: Any, new_cache: Callable[[], Any]) -> dict[int, Any]:
    """Prompts join two at a time, step, and leave longest first; returns each row's lone cache."""
    prompts = [helpers.tokens(n, seed=n) for n in LENGTHS]
    steps = helpers.tokens(4 * STEPS, rows=len(LENGTHS), seed=1).tolist()
    alone = {row: new_cache() for row in range(len(LENGTHS))}
    lengths = dict(enumerate(LENGTHS))
    taken = dict.fromkeys(lengths, 0)

    def prefilled(row: int) -> Any:
        cache = new_cache()
        helpers.run(model, prompts[row], cache)
        helpers.run(model, prompts[row], alone[row])
        return cache

    def step(rows: Sequence[int]) -> None:
        fed = [steps[row][taken[row]] for row in rows]
        together = masked_step(model, helpers, cache, fed, [lengths[row] for row in rows])
        for place, row in enumerate(rows):
            single = masked_step(model, helpers, alone[row], fed[place : place + 1], [lengths[row]])
            helpers.assert_same(together[place], single[0], helpers.tolerance(True))
            lengths[row] += 1
            taken[row] += 1

    cache = prefilled(0)
    for joining in range(1, len(LENGTHS)):
        join_rows(cache, prefilled(joining))
        for _ in range(STEPS // 2):
            step(range(joining + 1))
    rows = list(range(len(LENGTHS)))
    for leaving in (2, 0):
        kept = [place for place, row in enumerate(rows) if row != leaving]
        rows = [rows[place] for place in kept]
        select_rows(cache, kept, [lengths[row] for row in rows])
        for _ in range(STEPS):
            step(rows)
    return {"cache": cache, "alone": alone, "rows": rows}


@pytest.mark.parametrize(("arch", "method"), CASES)
def test_rows_that_join_and_leave_equal_rows_alone(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """Logits and state, with longer rows joining shorter ones and the other way round."""
    made = case(arch, method, resident="auto")
    with made.attach() as attachment:
        done = check_rows(made.model, helpers, attachment.new_cache)
        cache = done["cache"]
        for place, row in enumerate(done["rows"]):
            lone = done["alone"][row]
            helpers.assert_same_state(helpers.state(cache, place), helpers.state(lone))
            assert cache.seen_tokens[place] == lone.seen_tokens[0]
            assert cache.token_ids(place) == lone.token_ids()
        assert cache.nbytes().total == helpers.storages(cache)


@pytest.mark.parametrize(
    ("arch", "method", "reading"),
    [("llama", "latent+pool+k8v4", "shared"), ("qwen3_5", "ced-csa2", "absorbed")],
)
def test_rows_that_join_equal_rows_alone_when_reading_codes(
    case: Any, helpers: Any, arch: str, method: str, reading: str
) -> None:
    """The same for stored codes."""
    made = case(arch, method, resident=reading)
    with made.attach() as attachment:
        check_rows(made.model, helpers, attachment.new_cache)


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_skipped_prompts_join_as_well(case: Any, helpers: Any, arch: str) -> None:
    """Prompts that have left out the upper layers, beside one that was too short to."""
    made = case(arch, "ced-csa2+pool-overlap-3", prefill="skip", replay=12)
    with made.attach() as attachment:
        cache, alone = attachment.new_cache(), [attachment.new_cache() for _ in range(2)]
        prompts = [helpers.tokens(40), helpers.tokens(9, seed=3)]
        other = attachment.new_cache()
        for prompt, together, single in zip(prompts, (cache, other), alone, strict=True):
            helpers.last(made.model, prompt, together)
            helpers.last(made.model, prompt, single)
        join_rows(cache, other)
        for step in range(14):
            both = masked_step(made.model, helpers, cache, [5, 6], [40 + step, 9 + step])
            for row, token in enumerate((5, 6)):
                single = helpers.run(made.model, torch.tensor([[token]]), alone[row])
                helpers.assert_same(both[row], single[0, -1])


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "gemma3"])
def test_rows_of_a_plain_model_join_and_leave_too(
    tiny_model: Callable[..., Any], helpers: Any, arch: str
) -> None:
    """transformers' own cache, sliding windows and recurrent states included."""
    model = tiny_model(arch, dtype=torch.float64)
    check_rows(model, helpers, lambda: DynamicCache(config=model.config))


def test_room_of_a_row_that_has_left_is_given_back(case: Any, helpers: Any) -> None:
    """A short row is no larger for having run beside a long one."""
    made = case("llama", "ced-csa2", resident="shared")
    with made.attach() as attachment:
        cache, other, alone = (attachment.new_cache() for _ in range(3))
        made.run(helpers.tokens(200), cache)
        for short in (other, alone):
            made.run(helpers.tokens(30, seed=2), short)
        join_rows(cache, other)
        large = cache.nbytes().total
        select_rows(cache, [1], [30])
        assert cache.nbytes().total == alone.nbytes().total == helpers.storages(cache) < large


def test_rows_of_another_attachment_are_refused(case: Any, helpers: Any) -> None:
    """Two attachments may have different weights."""
    made = case("llama", "ced")
    caches = []
    for _ in range(2):
        with made.attach() as attachment:
            caches.append(attachment.new_cache())
            made.run(helpers.tokens(5), caches[-1])
    with pytest.raises(CacheError, match="same attachment"):
        join_rows(*caches)


def test_layers_of_unknown_kinds_are_not_joined(tiny_model: Callable[..., Any]) -> None:
    """A subclass may keep more than is known here."""
    cache = DynamicCache(config=tiny_model("llama").config)
    assert is_joinable(cache)
    cache.layers[0] = type("Other", (type(cache.layers[0]),), {})()
    assert not is_joinable(cache)
