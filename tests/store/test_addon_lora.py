"""An add-on's low-rank terms: saved and loaded with the rest, and counted."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from kvfold.plan import Plan
from kvfold.store.addon import WEIGHTS_FILE, AddOn

LATENT = {"method": "latent", "layers": [1, 2, 3], "rank": 6}
PLAN = Plan.from_dict({"anchors": 2, "window": 4, "depth": [LATENT]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_rank_terms_come_back_as_they_were(tiny_model, tmp_path, dtype):
    model = tiny_model("phi3", dtype=dtype)
    lora = {"rank": 3, "alpha": 7.5, "targets": ["q", "v", "o"], "layers": [0, 5]}
    made = AddOn.untrained(model, PLAN.replace(lora=lora))
    for weight in made.lora.parameters():
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(weight.numel()))
    made.save_pretrained(tmp_path / "addon")
    stored = load_file(tmp_path / "addon" / WEIGHTS_FILE)
    names = {name for name in stored if name.startswith("lora.")}
    assert names == {f"lora.layers.{n}.{t}.{m}" for n in (0, 5) for t in "qvo" for m in "ab"}
    read = AddOn.from_pretrained(tmp_path / "addon")
    assert (read.plan, read.base) == (made.plan, made.base)
    assert (read.lora.rank, read.lora.scale) == (3, 2.5)
    for (_, _, theirs), (_, _, mine) in zip(read.lora.terms(), made.lora.terms(), strict=True):
        assert torch.equal(mine.a, theirs.a) and torch.equal(mine.b, theirs.b)
        assert theirs.a.dtype == dtype and not theirs.a.requires_grad


def test_low_rank_terms_count_among_the_weights(tiny_model):
    model = tiny_model("llama")
    plain = AddOn.untrained(model, PLAN)
    with_terms = AddOn.untrained(model, PLAN.replace(lora={"rank": 3}))
    own = sum(weight.numel() for weight in with_terms.lora.parameters())
    assert with_terms.parameter_bytes() - plain.parameter_bytes() == 4 * own > 0
    assert len(list(with_terms.parameters())) - len(list(plain.parameters())) == 2 * 2 * 3
    assert "lora" in repr(with_terms) and "lora" not in repr(plain)
    assert {weight.dtype for weight in with_terms.to(torch.float16).lora.parameters()} == {
        torch.float16
    }
