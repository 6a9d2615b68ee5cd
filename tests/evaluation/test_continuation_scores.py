"""Continuations are scored as decoding after the prompt would see them, whatever the batch."""

from __future__ import annotations

import pytest
import torch

from kvfold import attach
from kvfold.errors import EvaluationError
from kvfold.evaluation.continuation import decoding_chunk, one_forward_is_enough
from kvfold.evaluation.continuation_scores import continuation_scores
from kvfold.plan import Plan

SAME = {"llama": 1e-9, "qwen3_5": 1e-4}
"""Of log-probabilities near -50: linear attention runs in float32 whatever the model's dtype."""

FOLDED = {
    "anchors": 2,
    "window": 4,
    "depth": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}],
}
SKIPPED = {**FOLDED, "prefill": "skip", "replay": 6}
EXACT = {**FOLDED, "prefill_attention": "exact"}
OF_HYBRIDS = {"depth": [{"method": "ced", "split": 4, "layers": [7]}]}
LENGTHS = [(20, 9), (3, 1), (31, 4), (7, 12)]


@pytest.fixture
def pairs(windows):
    rows = windows.tolist()
    return [(row[:p], row[p : p + c]) for row, (p, c) in zip(rows, LENGTHS, strict=False)]


def token_by_token(model, prompt, continuation, cache_argument):
    """What decoding sees: the prompt at once, then each token of the continuation on its cache."""
    total, greedy = 0.0, True
    with torch.no_grad():
        read = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        for token in continuation:
            every = read.logits[0, -1].log_softmax(-1)
            total, greedy = total + float(every[token]), greedy and int(every.argmax()) == token
            cache = getattr(read, "cache", None) or read.past_key_values
            read = model(torch.tensor([[token]]), use_cache=True, **cache_argument(model, cache))
    return total, greedy


def likeliest(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_plain_models_scores_are_those_of_one_forward(tiny_model, pairs):
    model = tiny_model("llama", dtype=torch.float64)
    pairs[1] = (pairs[1][0], likeliest(model, pairs[1][0], 3))
    for (prompt, continuation), score in zip(pairs, continuation_scores(model, pairs), strict=True):
        with torch.no_grad():
            every = model(torch.tensor([[*prompt, *continuation]])).logits[0].log_softmax(-1)
        seen = every[len(prompt) - 1 : -1]
        expected = seen.gather(1, torch.tensor(continuation)[:, None]).sum()
        assert score.log_probability == pytest.approx(float(expected), abs=SAME["llama"])
        assert score.greedy == (seen.argmax(-1).tolist() == continuation)
    assert [s.greedy for s in continuation_scores(model, pairs)] == [False, True, False, False]


@pytest.mark.parametrize("plan", [SKIPPED, EXACT, FOLDED], ids=["skip", "exact", "folded"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_attached_models_scores_are_those_of_decoding(
    tiny_model, bare_addon, pairs, cache_argument, name, plan, batch
):
    model = tiny_model(name, dtype=torch.float64)
    of_model = OF_HYBRIDS if name == "qwen3_5" else {}
    addon = bare_addon(model, Plan.from_dict({**plan, **of_model}))
    with attach(model, addon):
        expected = [token_by_token(model, *pair, cache_argument) for pair in pairs]
        chunk = decoding_chunk(addon.plan)
        found = [
            score
            for start in range(0, len(pairs), batch)
            for score in continuation_scores(model, pairs[start : start + batch], chunk=chunk)
        ]
    for score, (total, greedy) in zip(found, expected, strict=True):
        assert score.log_probability == pytest.approx(total, abs=SAME[name])
        assert score.greedy == greedy


def test_what_is_skipped_and_what_is_folded_is_felt(tiny_model, bare_addon, pairs):
    model = tiny_model("llama", dtype=torch.float64)
    found = []
    for plan in (None, FOLDED, SKIPPED, EXACT):
        if plan is None:
            found.append([continuation_scores(model, [pair])[0][0] for pair in pairs])
            continue
        addon = bare_addon(model, Plan.from_dict(plan))
        with attach(model, addon):
            scores = continuation_scores(model, pairs, chunk=decoding_chunk(addon.plan))
        found.append([score.log_probability for score in scores])
    longest = [scores[2] for scores in found]
    assert len({round(score, 3) for score in longest}) == 4
    shortest = [scores[1] for scores in found]
    assert shortest == pytest.approx([shortest[0]] * 4, abs=SAME["llama"])


def test_only_folded_and_full_prompts_can_be_scored_in_one_forward(tiny_model, bare_addon):
    plans = [Plan.from_dict(plan) for plan in (FOLDED, SKIPPED, EXACT)]
    assert [one_forward_is_enough(plan) for plan in (None, *plans)] == [True, True, False, False]
    assert [decoding_chunk(plan) for plan in plans] == [32, 6, 1]


@pytest.mark.parametrize("wrong", [([], [1]), ([1], [])])
def test_prompt_and_continuation_need_a_token_each(tiny_model, wrong):
    with pytest.raises(EvaluationError, match="at least one token"):
        continuation_scores(tiny_model("llama"), [([1], [2]), wrong])
    with pytest.raises(EvaluationError, match="at least one token"):
        continuation_scores(tiny_model("llama"), [])
