"""What a scheduler may do to requests changes nothing: chunks, shared prefixes, preemption."""

from __future__ import annotations

import itertools

import pytest

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

PLAN = {
    "anchors": 4,
    "window": 32,
    "depth": [
        {"method": "csa2", "source": 1, "readers": [2]},
        {"method": "latent", "layers": [4, 5], "rank": 48},
    ],
    "sequence": [{"method": "pool", "layers": [6], "group": 4}],
    "bits": [{"method": "turboquant", "layers": [7]}],
}
BLOCKS = 26
"""Fewer than four requests need at once."""
numbers = itertools.count()


def scheduler_of(started):
    return started.llm_engine.engine_core.engine_core.scheduler


def drive(started, prompts, count):
    """Steps by hand: tokens, cached tokens of each prompt, and how many requests were preempted."""
    from vllm import SamplingParams

    engine, scheduler = started.llm_engine, scheduler_of(started)
    names = [f"request-{next(numbers)}" for _ in prompts]
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    tokens, cached, preempted = {}, {}, set()
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            cached[output.request_id] = output.num_cached_tokens
        preempted |= {r.request_id for r in scheduler.requests.values() if r.num_preemptions}
    return [tokens[n] for n in names], [cached[n] for n in names], len(preempted)


def test_chunks_and_hits_of_a_shared_prefix_give_the_same_tokens(
    tiny_folder, random_addon, prompts, engine, folded_reference
):
    model, folder = tiny_folder("llama")
    plan = Plan.from_dict(PLAN)
    addon, saved = random_addon(model, plan)
    first, other = prompts((420, 60))
    second = first[:400] + other
    expected = folded_reference(model, addon, plan, [first, second], 8).tokens
    started = engine(
        folder, model.config, saved, enable_prefix_caching=True, max_num_batched_tokens=96
    )
    alone, cached, _ = drive(started, [first], 8)
    assert alone == expected[:1]
    assert cached == [0]
    together, cached, _ = drive(started, [first, second], 8)
    assert together == expected
    assert min(cached) >= 16


def test_preempted_requests_start_anew_and_give_the_same_tokens(
    tiny_folder, random_addon, prompts, engine, folded_reference
):
    model, folder = tiny_folder("llama")
    plan = Plan.from_dict(PLAN)
    addon, saved = random_addon(model, plan)
    given = prompts((120, 110, 100, 90))
    expected = folded_reference(model, addon, plan, given, 30).tokens
    started = engine(
        folder,
        model.config,
        saved,
        max_model_len=192,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=BLOCKS,
    )
    made, _, preempted = drive(started, given, 30)
    assert preempted > 0
    assert made == expected
