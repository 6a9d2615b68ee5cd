"""Divergence and agreement between two sets of predictions."""

from __future__ import annotations

import pytest
import torch

from kvfold.evaluation.chunks import LogitChunk
from kvfold.evaluation.fidelity import Fidelity


def chunk(base, folded):
    targets = torch.zeros(len(base), dtype=torch.int64)
    return LogitChunk(folded.log_softmax(-1), base.log_softmax(-1), targets)


def measure(*chunks):
    fidelity = Fidelity()
    for one in chunks:
        fidelity.update(one)
    return fidelity.result()


def random_scores(seed, rows=20, vocabulary=30):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


def test_a_model_agrees_wholly_with_itself():
    scores = random_scores(0)
    assert measure(chunk(scores, scores)) == {
        "kl": 0.0,
        "top_1_agreement": 1.0,
        "top_5_agreement": 1.0,
    }


def test_kl_is_taken_from_the_base_to_the_folded_model():
    base, folded = random_scores(1), random_scores(2)
    expected = torch.nn.functional.kl_div(
        folded.log_softmax(-1), base.softmax(-1), reduction="batchmean"
    )
    assert measure(chunk(base, folded))["kl"] == pytest.approx(expected.item(), rel=1e-12)


def test_agreement_counts_shared_likely_tokens():
    base = torch.tensor([[9.0, 8, 7, 6, 5, 0, 0], [9.0, 8, 7, 6, 5, 1, 0]])
    folded = torch.tensor([[8.0, 9, 7, 6, 0, 5, 0], [9.0, 8, 7, 6, 5, 1, 0]])
    result = measure(chunk(base, folded))
    assert result["top_1_agreement"] == 0.5
    assert result["top_5_agreement"] == pytest.approx((4 / 5 + 1) / 2)


def test_the_figures_do_not_depend_on_how_rows_are_chunked():
    base, folded = random_scores(3), random_scores(4)
    parts = [chunk(base[i : i + 3], folded[i : i + 3]) for i in range(0, 20, 3)]
    assert measure(*parts) == pytest.approx(measure(chunk(base, folded)))


def test_a_vocabulary_of_fewer_than_five_tokens_can_agree():
    scores = random_scores(5, vocabulary=3)
    assert measure(chunk(scores, scores))["top_5_agreement"] == 1.0
