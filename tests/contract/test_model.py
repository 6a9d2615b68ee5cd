"""What the attached model is to its user: exact where nothing is folded, and gone on detach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvfold.errors import AttachError
from kvfold.runtime.attach import attach

LOGITS_TOLERANCE = 1e-5
"""The identity plan against the plain model, in float32."""
HYBRID_TOLERANCE = 3e-5
"""The same where the model has Gated DeltaNet layers, which amplify rounding: in float32 the plain
tiny model is 6e-5 away from itself in float64, where a Llama is 1e-6 away."""


@pytest.mark.parametrize("prefill", ["folded", "exact"])
def test_identity_gives_the_plain_logits_and_tokens(
    case: Any, helpers: Any, arch: str, reading: str, prefill: str
) -> None:
    """Folding that changes nothing: logits within 1e-5 of their size, the same greedy text."""
    made = case(arch, "identity", dtype=torch.float32, resident=reading, prefill_attention=prefill)
    ids = helpers.tokens(40, rows=2)
    plain = helpers.run(made.model, ids)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    text = made.model.generate(ids, **options)
    with made.attach() as attachment:
        folded = made.run(ids, attachment.new_cache())
        again = made.model.generate(ids, **options)
    scale = plain.abs().max().item()
    hybrid = any(layer.kind == "linear_attention" for layer in made.anatomy.layers)
    tolerance = HYBRID_TOLERANCE if hybrid else LOGITS_TOLERANCE
    torch.testing.assert_close(folded / scale, plain / scale, atol=tolerance, rtol=0)
    assert torch.equal(text, again)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 5},
        {"do_sample": False, "num_beams": 3},
    ],
    ids=["greedy", "sampling", "beams"],
)
@pytest.mark.parametrize("method", ["ced-csa2", "pool-head-overlap", "latent+pool+k8v4", "mixed"])
def test_generate_equals_recomputing_everything_at_each_step(
    case: Any, helpers: Any, arch: str, method: str, options: dict[str, Any]
) -> None:
    """generate() with the folded cache equals generate() that folds the whole text anew."""
    made = case(arch, method, window=6)
    ids = helpers.tokens(17, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    common = {"max_new_tokens": 8, "attention_mask": mask, "eos_token_id": None, **options}
    with made.attach():
        torch.manual_seed(3)
        cached = made.model.generate(ids, **common)
        torch.manual_seed(3)
        anew = made.model.generate(ids, use_cache=False, **common)
    assert torch.equal(cached, anew)


def _traces(model: nn.Module) -> dict[str, Any]:
    """Everything that an attachment might leave on a model."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = (
            sorted(module.__dict__),
            [len(module._forward_hooks), len(module._forward_pre_hooks)],
            module.__dict__.get("forward"),
        )
    return found


def test_detach_restores_logits_hooks_and_attributes(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """After detaching nothing shows that an add-on was there."""
    made = case(arch, method)
    ids = helpers.tokens(30)
    logits, traces = helpers.run(made.model, ids), _traces(made.model)
    attachment = made.attach()
    folded = made.run(ids, attachment.new_cache())
    attachment.detach()
    attachment.detach()
    assert _traces(made.model) == traces
    assert torch.equal(helpers.run(made.model, ids), logits)
    if method != "identity":
        assert not torch.allclose(folded, logits, atol=1e-3)


def test_detach_also_happens_after_an_exception(case: Any, helpers: Any) -> None:
    """A with block that fails leaves the model as it was."""
    made = case("llama", "ced")
    ids = helpers.tokens(12)
    logits, traces = helpers.run(made.model, ids), _traces(made.model)
    with pytest.raises(RuntimeError, match="inside"), made.attach():
        raise RuntimeError("inside")
    assert _traces(made.model) == traces
    assert torch.equal(helpers.run(made.model, ids), logits)


def test_a_second_attachment_is_refused(case: Any) -> None:
    """Two add-ons can't share a model."""
    made = case("llama", "ced")
    with made.attach(), pytest.raises(AttachError, match="attached to this model already"):
        made.attach()
    made.attach().detach()


def test_a_failed_attach_leaves_the_model_alone(case: Any, tiny_model: Callable[..., Any]) -> None:
    """All checks come before the first change."""
    made = case("llama", "ced")
    other = tiny_model("llama", dtype=torch.float32)
    traces = _traces(other)
    with pytest.raises(AttachError, match="one dtype and device"):
        attach(other, made.addon)
    assert _traces(other) == traces


def test_exact_prefill_leaves_the_prompts_logits_as_they_are(
    case: Any, helpers: Any, arch: str, method: str
) -> None:
    """With exact prefill only what comes after the prompt feels the folding."""
    made = case(arch, method, prefill_attention="exact")
    ids = helpers.tokens(40)
    with made.attach() as attachment:
        cache = attachment.new_cache()
        prompt = made.run(ids, cache)
        after = made.run(helpers.tokens(1), cache)
    plain = helpers.run(made.plain, torch.cat([ids, helpers.tokens(1)], dim=1))
    helpers.assert_same(prompt, plain[:, :-1])
    assert torch.allclose(after[:, 0], plain[:, -1], atol=1e-3) == (method == "identity")
