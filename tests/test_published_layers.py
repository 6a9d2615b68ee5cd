"""One period of the published hybrids at full width: three linear layers and one of attention.

Random weights: this is about shapes, memory and plumbing at real sizes. MLPs have 256 channels,
since nothing that is folded or skipped depends on them and they are most of the time. The wider
model's fit takes minutes: `make test-slow`.
"""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.plan import Plan
from kvfold.runtime.attach import attach
from kvfold.runtime.ledger import predict_bytes

from .published import PUBLISHED, published_text_config

SPLIT, REPLAY, PROMPT = 2, 16, 40
VOCABULARY = 512


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if "27B" in name else []) for name in PUBLISHED
    ]
)
def period(request):
    """The model's first four layers."""
    from transformers import Qwen3_5ForCausalLM

    config = published_text_config(request.param)
    config.num_hidden_layers = 4
    config.layer_types = config.layer_types[:4]
    config.intermediate_size = 256
    config.vocab_size = VOCABULARY
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config).eval().requires_grad_(False)


def test_a_period_at_full_width_is_fitted_folded_skipped_and_generates(period, cache_argument):
    hidden = period.config.hidden_size
    plan = Plan.from_dict(
        {
            "window": 8,
            "depth": [{"method": "ced", "split": SPLIT, "layers": [3]}],
            "bits": [{"method": "turboquant", "layers": [3]}],
            "prefill": "skip",
            "replay": REPLAY,
            "state_projector": True,
        }
    )
    generator = torch.Generator().manual_seed(1)
    length = 512
    windows = -(-(hidden + 1) // (length - plan.anchors))
    tokens = torch.randint(VOCABULARY, (windows, length), generator=generator)
    addon = kvfold.fit(period, plan, tokens, progress=False)
    prompt = tokens[:2, :PROMPT]
    ran = []
    count = period.model.layers[3].mlp.register_forward_pre_hook(
        lambda _, args: ran.append(args[0].shape[1])
    )
    with attach(period, addon) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        skipped = period(prompt, logits_to_keep=1, **cache_argument(period, cache)).logits
        text = period.generate(prompt, max_new_tokens=3, do_sample=False)
    count.remove()
    with attach(period, addon, plan=plan.replace(prefill="full")), torch.no_grad():
        full = period(prompt, logits_to_keep=1).logits
    assert ran[:2] == [plan.anchors, REPLAY]
    assert torch.isfinite(skipped).all()
    assert text.shape == (2, PROMPT + 3)
    assert torch.equal(text[:, PROMPT], skipped[:, -1].argmax(-1))
    assert 0 < (skipped - full).abs().max() < full.abs().max()
    size = period.dtype.itemsize
    predicted = predict_bytes(plan, attachment.anatomy, PROMPT, batch=2, element_size=size)
    assert cache.nbytes().components == predicted.components
