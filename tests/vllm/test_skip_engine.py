"""Prefill skipping in a vLLM engine against kvfold's own runtime."""

from __future__ import annotations

import pytest
import torch

from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

CLOSE = 1e-4
SPLIT, REPLAY = 4, 48
LENGTHS = (400, 150, 33)


def skipping_plan(replay=REPLAY):
    """As `fast-prefill`, for eight layers."""
    ced = {"method": "ced", "split": SPLIT, "layers": [4, 5, 6, 7]}
    return Plan.from_dict({"depth": [ced], "prefill": "skip", "window": replay, "replay": replay})


@torch.no_grad()
def grown_reference(model, addon, prompts, count, replay=REPLAY):
    """Each token by a call of its own, whose window and replay hold all that has run by then.

    That is what layers read which keep exact for good what ran through them.
    """
    from kvfold import attach

    tokens, logprobs = [[] for _ in prompts], [[] for _ in prompts]
    for step in range(count):
        with attach(model, addon, plan=skipping_plan(replay + step)):
            for row, prompt in enumerate(prompts):
                given = torch.tensor([prompt + tokens[row]])
                scores = model(given, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
                tokens[row].append(int(scores.argmax()))
                logprobs[row].append(float(scores.max()))
    return tokens, logprobs


def check_gap(made, tokens, logprobs):
    assert made.tokens == tokens
    gaps = torch.tensor(made.logprobs) - torch.tensor(logprobs)
    assert float(gaps.abs().max()) < CLOSE


def test_greedy_tokens_equal_the_runtime_and_most_rows_are_left_out(
    tiny_folder, random_addon, prompts, engine, generate, benchmark
):
    """In mixed batches, and where vLLM compiles what it may (`enforce_eager=False`)."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    model, folder = tiny_folder("llama")
    addon, saved = random_addon(model, skipping_plan())
    given = prompts(LENGTHS)
    tokens, logprobs = grown_reference(model, addon, given, count=8)
    started = engine(folder, model.config, saved, enforce_eager=False)
    rows = benchmark("vllm_rows")
    started.apply_model(rows.count_rows)
    check_gap(generate(started, given, 8), tokens, logprobs)
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


def test_tensor_parallel_changes_no_token(tiny_folder, random_addon, prompts, engine, generate):
    model, folder = tiny_folder("llama")
    addon, saved = random_addon(model, skipping_plan())
    given = prompts(LENGTHS[1:])
    tokens, logprobs = grown_reference(model, addon, given, count=4)
    started = engine(folder, model.config, saved, tensor_parallel_size=2)
    check_gap(generate(started, given, 4), tokens, logprobs)
