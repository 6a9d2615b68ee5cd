"""One digest of weights, by which caches and evaluations know that nothing has changed."""

from __future__ import annotations

import hashlib

import pytest
import torch

from kvfold.runtime.weights_digest import weights_digest

WEIGHTS = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.tensor([1, 2]))]


def test_it_is_of_names_dtypes_shapes_and_bytes_in_order():
    told = hashlib.sha256(b"a torch.float32 (2, 3)\n")
    told.update(torch.arange(6.0).numpy().tobytes())
    told.update(b"b torch.int64 (2,)\n" + torch.tensor([1, 2]).numpy().tobytes())
    assert weights_digest(WEIGHTS) == told.hexdigest()
    told.update(b"more")
    assert weights_digest(iter(WEIGHTS), "more") == told.hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        [("c", WEIGHTS[0][1]), WEIGHTS[1]],
        [("a", WEIGHTS[0][1].view(3, 2)), WEIGHTS[1]],
        [("a", WEIGHTS[0][1].to(torch.int32)), WEIGHTS[1]],
        [("a", WEIGHTS[0][1] + 1e-7), WEIGHTS[1]],
        WEIGHTS[::-1],
        WEIGHTS[:1],
    ],
    ids=["name", "shape", "dtype", "value", "order", "fewer"],
)
def test_whatever_differs_makes_another(other):
    assert weights_digest(other) != weights_digest(WEIGHTS)


def test_layout_and_gradients_make_none():
    turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3).T.contiguous()).T
    assert not turned.is_contiguous()
    assert weights_digest([("a", turned), WEIGHTS[1]]) == weights_digest(WEIGHTS)


def test_half_precision_has_a_digest():
    half = [("a", torch.ones(3, dtype=torch.bfloat16))]
    assert weights_digest(half) != weights_digest([("a", torch.zeros(3, dtype=torch.bfloat16))])
