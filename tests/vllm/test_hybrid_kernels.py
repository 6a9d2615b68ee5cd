"""Qwen3.5 hybrids with vLLM's own kernels, which on a CPU run in bfloat16 only.

There two runs choose the same tokens by chance alone. Instead the tokens that vLLM chose are given
to kvfold's own runtime, once in float32 and once in bfloat16: vLLM's log-probabilities of them may
be about as far from the first as the second's are, by bfloat16's own rounding.
"""

from __future__ import annotations

import pytest
import torch

from kvfold import AddOn, attach
from kvfold.plan import Plan

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("torchvision", reason="vLLM's Qwen3.5 needs it: make test-vllm")

KERNELS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 2}
"""What the kernels are made for."""
TIMES_NOISE = 1.5
"""Of the mean gap to float32, against that of the runtime in bfloat16."""

FOLD = {
    "anchors": 4,
    "window": 32,
    "depth": [
        {"method": "csa2", "source": 3, "readers": [5]},
        {"method": "latent", "layers": [7, 9], "rank": 48},
    ],
    "sequence": [{"method": "pool", "layers": [7, 9], "group": 4}],
    "bits": [{"method": "turboquant", "layers": [11], "key_bits": 8, "value_bits": 8}],
}
SKIP = {
    "depth": [{"method": "ced", "split": 6, "layers": [7, 9, 11]}],
    "prefill": "skip",
    "window": 64,
    "replay": 64,
}


@torch.no_grad()
def scored(model, addon, plan, prompts, tokens):
    """Log-probabilities that the runtime gives to tokens after prompts."""
    found = []
    for prompt, chosen in zip(prompts, tokens, strict=True):
        if plan.prefill == "full":
            with attach(model, addon, plan=plan.replace(resident="shared")):
                logits = model(torch.tensor([prompt + chosen[:-1]])).logits[0, -len(chosen) :]
        else:
            rows = []
            for step in range(len(chosen)):
                replay = plan.replay + step
                with attach(model, addon, plan=plan.replace(window=replay, replay=replay)):
                    given = torch.tensor([prompt + chosen[:step]])
                    rows.append(model(given, logits_to_keep=1).logits[0, -1])
            logits = torch.stack(rows)
        made = logits.float().log_softmax(-1)
        found.append([float(row[token]) for row, token in zip(made, chosen, strict=True)])
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (FOLD, {}),
        (FOLD, {"tensor_parallel_size": 2}),
        (SKIP, {}),
        ({**SKIP, "state_projector": True}, {"tensor_parallel_size": 2}),
    ],
    ids=["fold", "fold on two", "skip", "skip with projected states on two"],
)
def test_vllms_kernels_are_as_near_to_float32_as_bfloat16_is(
    plan, settings, tiny_folder, random_addon, prompts, engine, generate, record_property
):
    plan = Plan.from_dict(plan)
    model, folder = tiny_folder("qwen3_5", dtype=torch.bfloat16, **KERNELS)
    addon, saved = random_addon(model, plan)
    given = prompts((300, 150, 33, 7))
    made = generate(engine(folder, model.config, saved, dtype="bfloat16", **settings), given)
    vllms = torch.tensor(made.logprobs)
    rounded = scored(model, addon, plan, given, made.tokens)
    exact = scored(
        model.float(),
        AddOn.from_pretrained(saved, dtype=torch.float32),
        plan,
        given,
        made.tokens,
    )
    noise = float((rounded - exact).abs().mean())
    gap = float((vllms - exact).abs().mean())
    record_property("mean gap to float32", {"vLLM": gap, "the runtime in bfloat16": noise})
    assert gap < TIMES_NOISE * noise
