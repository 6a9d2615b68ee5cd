"""An engine driven by hand: what its scheduler did to requests, besides what they said."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

numbers = itertools.count()


@dataclass(frozen=True)
class Driven:
    """Of each prompt: its greedy tokens, how many of its tokens were found in the prefix cache, and
    its steps, each as how many tokens had been computed before and how many it had.

    preempted: requests that were. most_blocks: held at once.
    """

    tokens: list[list[int]]
    cached: list[int]
    steps: list[list[tuple[int, int]]]
    preempted: int
    most_blocks: int


def scheduler_of(started: Any) -> Any:
    """The scheduler of an engine in this process."""
    return started.llm_engine.engine_core.engine_core.scheduler


def drive(started: Any, prompts: Sequence[list[int]], count: int) -> Driven:
    """So many tokens after each prompt, all begun at once."""
    from vllm import SamplingParams

    engine, scheduler = started.llm_engine, scheduler_of(started)
    pool = scheduler.kv_cache_manager.block_pool
    free, most = pool.get_num_free_blocks(), 0
    names = [f"request-{next(numbers)}" for _ in prompts]
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    outputs: dict[str, Any] = {}
    preempted: set[str] = set()
    with _recorded(scheduler) as steps:
        while engine.has_unfinished_requests():
            outputs.update((output.request_id, output) for output in engine.step())
            preempted |= {r.request_id for r in scheduler.requests.values() if r.num_preemptions}
            most = max(most, free - pool.get_num_free_blocks())
    return Driven(
        [list(outputs[name].outputs[0].token_ids) for name in names],
        [outputs[name].num_cached_tokens for name in names],
        [
            [step for request, step in steps if request == name or request.startswith(f"{name}-")]
            for name in names
        ],
        len(preempted),
        most,
    )


@contextmanager
def _recorded(scheduler: Any) -> Iterator[list[tuple[str, tuple[int, int]]]]:
    """Requests that are scheduled meanwhile, with their steps."""
    steps: list[tuple[str, tuple[int, int]]] = []
    stock = scheduler.schedule

    def schedule(*given: Any, **named: Any) -> Any:
        made = stock(*given, **named)
        computed = {new.req_id: new.num_computed_tokens for new in made.scheduled_new_reqs}
        known = made.scheduled_cached_reqs
        computed.update(zip(known.req_ids, known.num_computed_tokens, strict=True))
        steps.extend((n, (computed[n], count)) for n, count in made.num_scheduled_tokens.items())
        return made

    scheduler.schedule = schedule
    try:
        yield steps
    finally:
        del scheduler.schedule


def leave_blocks(started: Any, count: int) -> None:
    """Take all free blocks but so many out of an engine's pool, for good."""
    pool = scheduler_of(started).kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - count)


def forget_histories(started: Any) -> None:
    """Let a prefix cache lose what is kept of all tokens and not windows, as when blocks run short.

    A finished request gives the former back first, and what came back first is taken first.
    """
    from vllm.v1.core.kv_cache_utils import get_group_id
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    manager = scheduler_of(started).kv_cache_manager
    whole = {
        number
        for number, group in enumerate(manager.kv_cache_config.kv_cache_groups)
        if isinstance(group.kv_cache_spec, FullAttentionSpec)
    }
    held = [block for block in manager.block_pool.blocks if block.block_hash is not None]
    lost = {block.block_id for block in held if get_group_id(block.block_hash) in whole}
    manager.block_pool.evict_blocks(lost)


@dataclass(frozen=True)
class Visits:
    """What came of requests at random times: tokens of those that stayed to their end, by number,
    how many found a prefix, and how many were preempted."""

    tokens: dict[int, list[int]]
    cached: int
    preempted: int


def come_and_go(started: Any, asked: Sequence[tuple[list[int], int]], seed: int) -> Visits:
    """Prompts, each with a number of tokens to say, that come at random times; some leave early."""
    from vllm import SamplingParams

    rng, engine, scheduler = random.Random(seed), started.llm_engine, scheduler_of(started)
    waiting, there = list(range(len(asked))), set()
    done: dict[int, Any] = {}
    preempted: set[str] = set()
    while waiting or there:
        for number in waiting[: rng.choice((0, 0, 1, 1, 3))] if len(there) < 8 else ():
            prompt, count = asked[number]
            sampling = SamplingParams(
                max_tokens=count, temperature=0, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
            waiting.remove(number)
            there.add(number)
        if there and rng.random() < 0.05:
            leaves = rng.choice(sorted(there))
            engine.abort_request([str(leaves)])
            there.remove(leaves)
        for output in engine.step():
            if output.finished and int(output.request_id) in there:
                done[int(output.request_id)] = output
                there.remove(int(output.request_id))
        preempted |= {r.request_id for r in scheduler.requests.values() if r.num_preemptions}
    return Visits(
        {number: list(output.outputs[0].token_ids) for number, output in done.items()},
        sum(output.num_cached_tokens > 0 for output in done.values()),
        len(preempted),
    )
