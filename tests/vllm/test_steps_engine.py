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
EARLY = {
    **PLAN,
    "depth": [
        {"method": "csa2", "source": 1, "readers": [2]},
        {"method": "ced", "split": 3, "layers": [3, 4, 5]},
    ],
    "sequence": [
        {"method": "pool", "layers": [3, 4, 5], "group": 4, "overlap": True},
        {"method": "pool", "layers": [6], "group": 4},
    ],
}
"""A code of a token is there before any layer reads one: steps run whole."""
numbers = itertools.count()


def scheduler_of(started):
    return started.llm_engine.engine_core.engine_core.scheduler


def drive(started, prompts, count):
    """Steps by hand: tokens, cached tokens of each prompt, requests preempted, blocks at most."""
    from vllm import SamplingParams

    engine, scheduler = started.llm_engine, scheduler_of(started)
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    names = [f"request-{next(numbers)}" for _ in prompts]
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    tokens, cached, preempted, most = {}, {}, set(), 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            cached[output.request_id] = output.num_cached_tokens
        preempted |= {r.request_id for r in scheduler.requests.values() if r.num_preemptions}
        most = max(most, free - pool.get_num_free_blocks())
    return [tokens[n] for n in names], [cached[n] for n in names], len(preempted), most


HYBRID_PLAN = {
    **PLAN,
    "depth": [
        {"method": "csa2", "source": 1, "readers": [3]},
        {"method": "latent", "layers": [5, 7], "rank": 48},
    ],
    "sequence": [{"method": "pool", "layers": [9], "group": 4}],
    "bits": [{"method": "turboquant", "layers": [11]}],
}


@pytest.mark.parametrize(
    ("family", "plan", "chunk"), [("llama", PLAN, 96), ("qwen3_5", HYBRID_PLAN, 500)]
)
def test_chunks_shared_prefixes_and_preemption_change_no_token(
    family, plan, chunk, request, tiny_folder, random_addon, prompts, engine, folded_reference
):
    if family == "qwen3_5":
        request.getfixturevalue("plain_delta")
    model, folder = tiny_folder(family)
    plan = Plan.from_dict(plan)
    addon, saved = random_addon(model, plan)
    first, other, *short = prompts((940, 50, 30, 29, 28, 27))
    second = first[:900] + other
    expected = folded_reference(model, addon, plan, [first, second], 8).tokens
    expected_short = folded_reference(model, addon, plan, short, 60).tokens
    started = engine(
        folder, model.config, saved, enable_prefix_caching=True, max_num_batched_tokens=chunk
    )
    alone, cached, _, _ = drive(started, [first], 8)
    assert (alone, cached) == (expected[:1], [0])
    together, cached, _, _ = drive(started, [first, second], 8)
    assert together == expected
    assert min(cached) >= 16

    made, _, preempted, most = drive(started, short, 60)
    assert (made, preempted) == (expected_short, 0)
    assert started.reset_prefix_cache()
    pool = scheduler_of(started).kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - most + 3)
    made, _, preempted, _ = drive(started, short, 60)
    assert preempted > 0
    assert made == expected_short


def test_blocks_that_no_later_step_reads_are_left_out_and_no_token_changes(
    tiny_folder, random_addon, prompts, engine, folded_reference
):
    """Without shared prefixes, of a step longer than the window."""
    from kvfold.vllm.specs import AnchorWindowSpec

    model, folder = tiny_folder("llama")
    plan = Plan.from_dict(EARLY)
    addon, saved = random_addon(model, plan)
    given = prompts((700, 30, 29, 28, 27))
    expected = folded_reference(model, addon, plan, given, 60).tokens
    started = engine(folder, model.config, saved, max_num_batched_tokens=256)
    made, _, preempted, _ = drive(started, given, 60)
    assert (made, preempted) == (expected, 0)

    managers = scheduler_of(started).kv_cache_manager.coordinator.single_type_managers
    made, _, _, alone = drive(started, given[:1], 60)
    assert made == expected[:1]
    held = 0
    for manager in managers:
        spec, size = manager.kv_cache_spec, manager.block_size
        if isinstance(spec, AnchorWindowSpec):
            held += 2 * (-(-spec.sliding_window // size) + 1) + -(-spec.anchors // size)
        else:
            held += -(-760 // size)
    assert alone <= held

    _, _, _, most = drive(started, given[1:], 60)
    pool = scheduler_of(started).kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - most + 3)
    made, _, preempted, _ = drive(started, given[1:], 60)
    assert preempted > 0
    assert made == expected[1:]
