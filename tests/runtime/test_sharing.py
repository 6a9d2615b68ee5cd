"""Two instances of a model, one set of weights."""

from __future__ import annotations

from typing import Any

import torch

from kvfold.runtime.sharing import sharing_weights


def test_a_second_instance_has_the_same_weights_and_its_own_forwards(tiny_model: Any) -> None:
    model = tiny_model("llama")
    other = sharing_weights(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = model(ids).logits
        other.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
        assert not torch.equal(other(ids).logits, before)
        assert torch.equal(model(ids).logits, before)
    pointers = [{p.data_ptr() for p in m.parameters()} for m in (model, other)]
    assert pointers[0] == pointers[1]
