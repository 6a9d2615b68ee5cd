"""Prefill skipping in a vLLM engine against kvfold's own runtime."""

from __future__ import annotations

import pytest

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

CLOSE = 1e-4
REPLAY = 48
LENGTHS = (400, 150, 33)


CED = {"method": "ced", "split": 4, "layers": [4, 5, 6, 7]}
PLAN = Plan.from_dict({"depth": [CED], "prefill": "skip", "window": REPLAY, "replay": REPLAY})
"""As `fast-prefill`, for eight layers."""


def test_greedy_tokens_equal_the_runtime_and_most_rows_are_left_out(
    tiny_folder, random_addon, prompts, engine, generate, grown_reference, decoder_of
):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    model, folder = tiny_folder("llama")
    addon, saved = random_addon(model, PLAN)
    given = prompts(LENGTHS)
    expected = grown_reference(model, addon, PLAN, given, 8)
    started = engine(folder, model.config, saved)
    skipping = decoder_of(started).kvfold
    run, left_out = skipping.rows_run, skipping.rows_left_out
    made = generate(started, given, 8)
    assert made.tokens == expected.tokens
    assert made.gap(expected) < CLOSE
    exact = [min(n, REPLAY + 4) for n in LENGTHS]
    assert skipping.rows_left_out - left_out == sum(LENGTHS) - sum(exact)
    assert skipping.rows_run - run == sum(exact) + 7 * len(LENGTHS)
    with pytest.raises(
        VLLMValidationError, match="prompt_logprobs can't be had of a skipped prompt"
    ):
        started.generate(
            [{"prompt_token_ids": given[2]}],
            SamplingParams(prompt_logprobs=1, max_tokens=1, detokenize=False),
            use_tqdm=False,
        )
