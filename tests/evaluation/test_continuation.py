"""The loss after a prompt is what one forward over the whole window says of those tokens."""

from __future__ import annotations

import pytest
import torch

from kvfold import attach
from kvfold.errors import EvaluationError
from kvfold.evaluation.continuation import continuation_loss, summary
from kvfold.plan import Plan
from kvfold.presets import preset

SAME = 1e-5
"""Of losses near 5: linear attention runs in float32 whatever the model's dtype."""


def naive(model, windows, prompt):
    """Mean loss of the tokens from `prompt` on, from the logits of one whole forward."""
    losses = []
    for window in windows:
        with torch.no_grad():
            log_probs = model(window[None]).logits[0].log_softmax(-1)
        rows = range(prompt, len(window))
        losses.append(sum(-log_probs[t - 1, window[t]].item() for t in rows) / len(rows))
    return torch.tensor(losses, dtype=torch.float64)


def close(found, expected):
    return torch.allclose(found, expected, rtol=0, atol=SAME)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3"])
@pytest.mark.parametrize("prompt", [1, 17, 39])
def test_it_equals_the_loss_of_one_forward_on_the_plain_model(tiny_model, windows, name, prompt):
    model = tiny_model(name, dtype=torch.float64)
    found = continuation_loss(model, windows, prompt)
    assert found.shape == (6,)
    assert found.dtype == torch.float64
    assert close(found, naive(model, windows, prompt))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_it_equals_the_plain_models_with_an_add_on_that_changes_nothing(
    tiny_model, windows, bare_addon, name
):
    from kvfold.anatomy import anatomy

    model = tiny_model(name, dtype=torch.float64)
    expected = naive(model, windows, 20)
    plan = preset("identity", anatomy(model)).replace(anchors=2, window=5)
    with attach(model, bare_addon(model, plan)):
        assert close(continuation_loss(model, windows, 20), expected)


def test_it_tells_a_fold_that_loses_the_history(tiny_model, windows, bare_addon):
    model = tiny_model("llama", dtype=torch.float64)
    plan = Plan.from_dict(
        {"anchors": 0, "window": 3, "depth": [{"method": "drop", "layers": list(range(6))}]}
    )
    expected = naive(model, windows, 20)
    with attach(model, bare_addon(model, plan)):
        assert not torch.allclose(continuation_loss(model, windows, 20), expected, rtol=1e-3)


@pytest.mark.parametrize("batch", [2, 4, 6])
def test_windows_of_a_batch_do_not_mix(tiny_model, windows, batch):
    model = tiny_model("qwen3_5", dtype=torch.float64)
    alone = continuation_loss(model, windows, 20)
    assert close(continuation_loss(model, windows, 20, batch=batch), alone)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
@pytest.mark.parametrize("chunk", [1, 7, 29, 100])
def test_it_does_not_depend_on_the_chunks(tiny_model, windows, name, chunk):
    model = tiny_model(name, dtype=torch.float64)
    assert close(continuation_loss(model, windows, 10, chunk=chunk), naive(model, windows, 10))


@pytest.mark.parametrize("prompt", [-1, 0, 40, 41])
def test_prompt_and_continuation_need_a_token_each(tiny_model, windows, prompt):
    with pytest.raises(EvaluationError, match=rf"\(6, 40\) with a prompt of {prompt};"):
        continuation_loss(tiny_model("llama"), windows, prompt)


def test_a_loss_that_is_not_finite_is_refused(tiny_model, windows):
    model = tiny_model("llama", seed=4)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    with pytest.raises(EvaluationError, match="must be finite"):
        continuation_loss(model, windows, 20)


def test_the_rise_over_the_plain_model_has_the_error_of_the_differences():
    base = torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)
    found = summary(base + torch.tensor([0.1, 0.2, 0.3]), base)
    assert found["loss"] == pytest.approx(3.2)
    assert found["perplexity"] == pytest.approx(24.5325, rel=1e-5)
    assert found["loss_rise"] == pytest.approx(0.2)
    assert found["loss_rise_error"] == pytest.approx(0.1 / 3**0.5)
    assert found["losses"] == pytest.approx([1.1, 3.2, 5.3])
    assert summary(base[:1], base[:1])["loss_rise_error"] is None
    assert set(summary(base)) == {"loss", "perplexity", "losses"}
