"""Prefill skipping in a vLLM engine against kvfold's own runtime."""

from __future__ import annotations

import pytest

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

CLOSE = 1e-4
SPLIT, REPLAY = 4, 48
LENGTHS = (400, 150, 33)


def skipping_plan():
    """As `fast-prefill`, for eight layers."""
    ced = {"method": "ced", "split": SPLIT, "layers": [4, 5, 6, 7]}
    return Plan.from_dict({"depth": [ced], "prefill": "skip", "window": REPLAY, "replay": REPLAY})


def test_greedy_tokens_equal_the_runtime_and_most_rows_are_left_out(
    tiny_folder, random_addon, prompts, engine, generate, grown_reference, benchmark
):
    """In mixed batches, and where vLLM compiles what it may (`enforce_eager=False`)."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    model, folder = tiny_folder("llama")
    addon, saved = random_addon(model, skipping_plan())
    given = prompts(LENGTHS)
    expected = grown_reference(model, addon, skipping_plan(), given, 8)
    started = engine(folder, model.config, saved, enforce_eager=False)
    rows = benchmark("vllm_rows")
    started.apply_model(rows.count_rows)
    generate(started, given, 8).require_close(expected, CLOSE)
    exact = sum(min(n, REPLAY + 4) for n in LENGTHS)
    later = 7 * len(LENGTHS)
    assert started.apply_model(rows.take_rows) == [
        [sum(LENGTHS) + later] * SPLIT + [exact + later] * (model.config.num_hidden_layers - SPLIT)
    ]
    with pytest.raises(
        VLLMValidationError, match="prompt_logprobs can't be had of a skipped prompt"
    ):
        started.generate(
            [{"prompt_token_ids": given[2]}],
            SamplingParams(prompt_logprobs=1, max_tokens=1, detokenize=False),
            use_tqdm=False,
        )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tensor_parallel_changes_no_token(
    family, tiny_folder, random_addon, prompts, engine, generate, grown_reference
):
    model, folder = tiny_folder(family)
    addon, saved = random_addon(model, skipping_plan())
    given = prompts(LENGTHS[1:])
    expected = grown_reference(model, addon, skipping_plan(), given, 4)
    started = engine(folder, model.config, saved, tensor_parallel_size=2)
    generate(started, given, 4).require_close(expected, CLOSE)
