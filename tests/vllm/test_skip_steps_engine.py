"""What a scheduler may do to prompts that skip layers, against the same steps in plain tensors."""

from __future__ import annotations

import pytest

from kvfold.plan import Plan

from .driving import drive, leave_blocks
from .plain_skip import SkippedText

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

REPLAY, ANCHORS = 48, 4
UPPER = {"llama": [4, 5, 6, 7], "qwen3": [4, 5, 6, 7], "qwen3_5": [7, 9, 11]}
UPPER.update(qwen3_moe=UPPER["qwen3"], qwen3_5_moe=UPPER["qwen3_5"])
SPLITS = {family: 6 if family.startswith("qwen3_5") else 4 for family in UPPER}


@pytest.fixture
def skipping(request, tiny_folder, random_addon):
    """`skipping(family)`: model, its folder, an add-on that skips, its folder."""

    def make(family):
        if SPLITS[family] == 6:
            request.getfixturevalue("plain_delta")
        ced = {"method": "ced", "split": SPLITS[family], "layers": UPPER[family]}
        plan = {"prefill": "skip", "anchors": ANCHORS, "window": REPLAY, "replay": REPLAY}
        model, folder = tiny_folder(family)
        return model, folder, *random_addon(model, Plan.from_dict({"depth": [ced], **plan}))

    return make


def replayed(fresh, prompt, steps, count, found=None):
    """Greedy tokens by a run's own steps, and the text.

    fresh: makes an empty text. found: whose rows a step that begins further on went on from.
    """
    tokens, text = list(prompt), fresh()
    for computed, new in steps:
        if computed != text.seen:
            text = found.beginning(computed) if computed else fresh()
        logits = text.feed(tokens[computed : computed + new])
        if computed + new == len(tokens):
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :][:count], text


@pytest.mark.parametrize("family", list(SPLITS))
def test_the_reference_itself_gives_what_the_runtime_gives_of_whole_prompts(
    family, skipping, prompts, grown_reference
):
    model, _, addon, _ = skipping(family)
    given = prompts((300, 150, REPLAY + 3))
    expected = grown_reference(model, addon, addon.plan, given, 4)
    for prompt, tokens in zip(given, expected.tokens, strict=True):
        steps = [(0, len(prompt)), *((len(prompt) + n, 1) for n in range(3))]
        made, text = replayed(lambda: SkippedText(model, addon, addon.plan), prompt, steps, 4)
        assert made == tokens
        assert text.left_out == max(0, len(prompt) - REPLAY - ANCHORS)


@pytest.mark.parametrize("family", list(SPLITS))
def test_prompts_in_chunks_and_preempted_ones_skip_as_their_steps_say(
    family, skipping, prompts, engine
):
    model, folder, addon, saved = skipping(family)
    given = prompts((430, 250, 120, 33))

    def check(run):
        left_out = 0
        for prompt, tokens, steps in zip(given, run.tokens, run.steps, strict=True):
            made, text = replayed(
                lambda: SkippedText(model, addon, addon.plan), prompt, steps, len(tokens)
            )
            assert tokens == made
            left_out += text.left_out
        return left_out

    started = engine(folder, model.config, saved, max_num_batched_tokens=160)
    roomy = drive(started, given, 40)
    assert roomy.preempted == 0
    assert max(len(steps) for steps in roomy.steps) >= 40 + 2  # more than one of a prompt
    assert check(roomy) > 200
    leave_blocks(started, roomy.most_blocks - 3)
    cramped = drive(started, given, 40)
    assert cramped.preempted > 0
    assert check(cramped) > 200


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_shared_beginning_is_read_as_the_prompt_that_ran_it_left_it(
    family, skipping, prompts, engine
):
    """Hybrids: `test_hybrid_engine.py`."""
    model, folder, addon, saved = skipping(family)
    first, other = prompts((430, 150))
    second = first[:400] + other
    started = engine(
        folder, model.config, saved, enable_prefix_caching=True, max_num_batched_tokens=160
    )
    run = drive(started, [first], 8)

    def fresh():
        return SkippedText(model, addon, addon.plan)

    made, left = replayed(fresh, first, run.steps[0], 8)
    assert run.tokens == [made]
    again = drive(started, [second], 8)
    assert again.cached[0] >= 300
    assert again.steps[0][0][0] == again.cached[0]
    made, text = replayed(fresh, second, again.steps[0], 8, found=left)
    assert again.tokens == [made]
    assert text.left_out > 0
