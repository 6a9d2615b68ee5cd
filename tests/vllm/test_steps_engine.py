"""What a scheduler may do to requests changes nothing: chunks, shared prefixes, preemption."""

from __future__ import annotations

import pytest

from kvfold.plan import Plan

from .driving import drive, forget_histories, leave_blocks, scheduler_of

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
    ("family", "plan", "chunk"),
    [("llama", PLAN, 96), ("qwen3", PLAN, 96), ("qwen3_5", HYBRID_PLAN, 500)],
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
    alone = drive(started, [first], 8)
    assert (alone.tokens, alone.cached) == (expected[:1], [0])
    together = drive(started, [first, second], 8)
    assert together.tokens == expected
    assert min(together.cached) >= 16

    roomy = drive(started, short, 60)
    assert (roomy.tokens, roomy.preempted) == (expected_short, 0)
    assert started.reset_prefix_cache()
    leave_blocks(started, roomy.most_blocks - 3)
    cramped = drive(started, short, 60)
    assert cramped.preempted > 0
    assert cramped.tokens == expected_short


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
    together = drive(started, given, 60)
    assert (together.tokens, together.preempted) == (expected, 0)

    managers = scheduler_of(started).kv_cache_manager.coordinator.single_type_managers
    alone = drive(started, given[:1], 60)
    assert alone.tokens == expected[:1]
    held = 0
    for manager in managers:
        spec, size = manager.kv_cache_spec, manager.block_size
        if isinstance(spec, AnchorWindowSpec):
            held += 2 * (-(-spec.sliding_window // size) + 1) + -(-spec.anchors // size)
        else:
            held += -(-760 // size)
    assert alone.most_blocks <= held

    roomy = drive(started, given[1:], 60)
    leave_blocks(started, roomy.most_blocks - 3)
    cramped = drive(started, given[1:], 60)
    assert cramped.preempted > 0
    assert cramped.tokens == expected[1:]


LATE = {
    "anchors": 4,
    "window": 32,
    "depth": [{"method": "latent", "layers": [4, 5, 6, 7], "rank": 96}],
}
SOON = {**LATE, "depth": [{"method": "csa2", "source": 4, "readers": [5, 6, 7]}]}


@pytest.mark.parametrize("plan", [LATE, SOON], ids=["late", "early"])
def test_prompts_that_come_at_once_share_only_what_is_written(
    plan, tiny_folder, random_addon, prompts, engine, folded_reference
):
    """vLLM finds another request's blocks from the step on that writes them."""
    model, folder = tiny_folder("llama")
    plan = Plan.from_dict(plan)
    addon, saved = random_addon(model, plan)
    first, *others = prompts((300, 300, 280, 290))
    expected = folded_reference(model, addon, plan, [first], 8).tokens
    started = engine(
        folder, model.config, saved, enable_prefix_caching=True, max_num_batched_tokens=512
    )
    drive(started, others, 8)  # leaves rows of its own in the blocks
    assert started.reset_prefix_cache()
    run = drive(started, [first] * 3, 8)
    assert run.tokens == expected * 3
    assert run.cached[0] == 0
    assert min(run.cached[1:]) > 0

    # A window that an earlier prompt has left, and slots that a longer one makes again later on
    period = scheduler_of(started).block_size
    end = -(-576 // period) * period
    (longer,) = prompts((end + period + 10,))
    shorter = longer[: end + 5]
    expected = folded_reference(model, addon, plan, [longer, shorter], 8).tokens
    assert started.reset_prefix_cache()
    drive(started, [shorter], 8)
    forget_histories(started)
    run = drive(started, [longer, shorter], 8)
    assert run.tokens == expected
    assert run.cached == [0, end]
