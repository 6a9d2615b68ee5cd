"""Regenerated keys vary as the real ones do, about the same mean."""

from __future__ import annotations

import pytest
import torch

from kvfold.anatomy import anatomy
from kvfold.fitting.fit import fit
from kvfold.methods import Source
from kvfold.plan import Plan
from kvfold.runtime.capture import capture

VARIANCE = 0.02
"""Allowed difference of a ratio of variances on the text that was fitted: ridge and float32."""

DEPTHS = {
    "ced": [{"method": "ced", "split": 2, "layers": [4, 5]}],
    "csa2": [{"method": "csa2", "source": 2, "readers": [4, 5]}],
    "latent": [{"method": "latent", "layers": [2, 4, 5], "rank": 12}],
    "latent of H_s": [{"method": "latent", "layers": [4, 5], "rank": 6, "split": 2}],
}


def _decoded(model, depth, ids, strength):
    plan = Plan.from_dict({"anchors": 0, "depth": DEPTHS[depth]})
    addon = fit(model, plan, ids, key_dispersion=strength, progress=False)
    method = addon.pipelines[0].depth
    sources = {*method.inputs, Source("keys", 5), Source("values", 5)}
    seen = capture(model, anatomy(model), sources, ids)
    with torch.no_grad():
        keys, values = method.decode(5, method.encode(seen))
    return seen[Source("keys", 5)], keys, seen[Source("values", 5)], values


def _variance_by_head(x):
    return x.flatten(0, 1).var(dim=0).view(-1, 16).sum(dim=1)


@pytest.mark.parametrize("depth", DEPTHS)
def test_keys_get_their_variance_back_and_values_keep_the_least_squares_fit(tiny_model, depth):
    model = tiny_model("llama", dtype=torch.float64)
    ids = torch.randint(3, 97, (12, 40), generator=torch.Generator().manual_seed(0))
    true_keys, plain_keys, _, plain_values = _decoded(model, depth, ids, 0.0)
    _, keys, _, values = _decoded(model, depth, ids, 1.0)
    shrunk = _variance_by_head(plain_keys) / _variance_by_head(true_keys)
    assert (shrunk < 0.95).all()
    restored = _variance_by_head(keys) / _variance_by_head(true_keys)
    expected = (shrunk * 9).clamp(max=1.0)
    torch.testing.assert_close(restored, expected, atol=VARIANCE, rtol=0)
    torch.testing.assert_close(keys.mean((0, 1)), true_keys.mean((0, 1)), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(values, plain_values)
    error = (true_keys - keys).square().mean()
    assert error >= (true_keys - plain_keys).square().mean()


def test_keys_that_a_norm_follows_are_left_to_it(tiny_model):
    model = tiny_model("qwen3", dtype=torch.float64)
    ids = torch.randint(3, 97, (12, 40), generator=torch.Generator().manual_seed(0))
    plain, restored = (_decoded(model, "csa2", ids, strength)[1] for strength in (0.0, 1.0))
    assert torch.equal(plain, restored)
