"""Losses are those of whole forwards; without prompt logits a plan is scored after the prompt."""

from __future__ import annotations

import math

import pytest
import torch

from kvfold import attach
from kvfold.errors import EvaluationError
from kvfold.evaluation.continuation import continuation_loss
from kvfold.evaluation.tasks import perplexity
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Answer, Subject
from kvfold.evaluation.tasks.texts import text_windows
from kvfold.plan import Plan

SAME = 1e-6


@pytest.fixture
def task(data, characters):
    return perplexity.make(TaskSettings(data, limit=4, tokenizer=characters, lengths=(20, 60)))


def ids_of(task, data, characters, item):
    text = (data / "wikitext-2" / "test.txt").read_text()
    shorter = {n: made for n, made in task.windows.by_length.items() if n < item["length"]}
    start = item["window"] * item["length"] + sum(n * len(made) for n, made in shorter.items())
    return torch.tensor([characters(text).input_ids[start : start + item["length"]]])


def dropped(attention):
    layers = list(range(6))
    return Plan.from_dict(
        {
            "anchors": 1,
            "window": 5,
            "prefill_attention": attention,
            "depth": [{"method": "drop", "layers": layers}],
        }
    )


def test_losses_are_those_of_one_whole_forward(task, data, characters, tiny_model):
    model = tiny_model("llama", dtype=torch.float64)
    for answer, item in zip(
        task.answers(Subject("plain", model, characters), task.items()), task.items(), strict=True
    ):
        ids = ids_of(task, data, characters, item)
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1)
        losses = -scores.gather(-1, ids[0, 1:, None])[:, 0]
        assert answer.scores["loss"] == pytest.approx(losses.mean().item(), abs=SAME)
        last = losses[-(item["length"] // 2) :].mean().item()
        assert answer.scores["continuation_loss"] == pytest.approx(last, abs=SAME)


def test_a_folded_pass_tells_what_feeding_the_continuation_tells(
    task, data, characters, tiny_model, bare_addon
):
    model = tiny_model("llama", dtype=torch.float64)
    (item,) = (i for i in task.items() if i["id"] == task.items()[-1]["id"])
    ids, plan = ids_of(task, data, characters, item), dropped("folded")
    plain = task.answers(Subject("plain", model, characters), [item])[0].scores
    with attach(model, bare_addon(model, plan)):
        (answer,) = task.answers(Subject("folded", model, characters), [item])
        fed = continuation_loss(model, ids, item["length"] // 2)
    assert answer.scores["continuation_loss"] == pytest.approx(fed.item(), abs=SAME)
    assert abs(answer.scores["continuation_loss"] - plain["continuation_loss"]) > 1e-3


@pytest.mark.parametrize("prefill", ["full", "skip"])
def test_a_prompt_that_feels_no_folding_is_scored_by_what_follows(
    task, characters, tiny_model, bare_addon, prefill
):
    model = tiny_model("llama", dtype=torch.float64)
    plan = dropped("exact")
    if prefill == "skip":
        plan = Plan.from_dict(
            {
                "window": 4,
                "prefill": "skip",
                "replay": 8,
                "depth": [{"method": "ced", "split": 3, "layers": [3, 4, 5]}],
            }
        )
    plain = task.answers(Subject("plain", model, characters), task.items())
    with attach(model, bare_addon(model, plan)):
        found = task.answers(Subject("folded", model, characters), task.items())
    assert all(set(answer.scores) == {"continuation_loss"} for answer in found)
    longest = (plain[-1].scores["continuation_loss"], found[-1].scores["continuation_loss"])
    assert abs(longest[0] - longest[1]) > 1e-3
    assert set(task.summary(found)) == {
        "continuation_perplexity/20",
        "continuation_perplexity/60",
        "continuation_perplexity",
    }


def test_after_an_exactly_read_prompt_each_token_is_told_by_what_decoding_would_see(
    task, data, characters, tiny_model, bare_addon, cache_argument
):
    """Tokens that are fed together would see each other exactly."""
    model = tiny_model("llama", dtype=torch.float64)
    (item,) = (i for i in task.items() if i["id"] == task.items()[-1]["id"])
    ids, losses = ids_of(task, data, characters, item), []
    with attach(model, bare_addon(model, dropped("exact"))) as attachment, torch.no_grad():
        (answer,) = task.answers(Subject("exact", model, characters), [item])
        cache, prompt = attachment.new_cache(), item["length"] // 2
        for start, stop in [(0, prompt), *((n, n + 1) for n in range(prompt, ids.shape[1] - 1))]:
            scores = (
                model(ids[:, start:stop], **cache_argument(model, cache))
                .logits[0, -1]
                .log_softmax(-1)
            )
            losses.append(-scores[ids[0, stop]].item())
    assert answer.scores["continuation_loss"] == pytest.approx(sum(losses) / len(losses), abs=SAME)


def test_the_summary_weighs_every_token_alike(task):
    short = Answer("20/0", {"length": 20}, {"loss": 1.0, "continuation_loss": 2.0})
    long = Answer("60/0", {"length": 60}, {"loss": 3.0, "continuation_loss": 4.0})
    found = task.summary([short, long])
    assert found["perplexity/20"] == pytest.approx(math.e)
    assert found["perplexity"] == pytest.approx(math.exp((19 * 1 + 59 * 3) / 78))
    assert found["continuation_perplexity"] == pytest.approx(math.exp((10 * 2 + 30 * 4) / 40))


def test_a_loss_that_is_not_finite_is_refused(task, characters, tiny_model):
    model = tiny_model("llama", seed=4)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    with pytest.raises(EvaluationError, match=r"broken gave loss \w+ on window 20/"):
        task.answers(Subject("broken", model, characters), task.items())


def test_the_tiny_language_brings_its_own_text():
    from kvfold.models import load_tokenizer

    tokenizer = load_tokenizer("tiny-hybrid")
    task = perplexity.make(TaskSettings(None, limit=2, tokenizer=tokenizer, lengths=(64,)))
    assert task.settings()["text"] == {"name": "documents of the tiny language", "seed": 0}
    assert tokenizer.decode(task._ids(task.items()[0])).startswith("<doc>")


@pytest.mark.parametrize("tokens", [83, 300, 2000, 5000])
def test_no_token_is_told_at_two_lengths(tokens, tmp_path, characters):
    """However short the text is; each length has its part of it."""
    text = "".join(chr(ord("a") + n % 26) for n in range(tokens))
    (tmp_path / "text.txt").write_text(text)
    settings = TaskSettings(tmp_path / "text.txt", tokenizer=characters)
    counts = {5: 20, 18: 7, 60: 3}
    windows = text_windows(settings, counts).by_length
    every = [ids for length in counts for ids in windows[length]]
    joined = [token for ids in every for token in ids]
    assert joined == list(characters(text).input_ids[: len(joined)])
    assert all(1 <= len(windows[length]) <= counts[length] for length in counts)
    if tokens == 2000:
        assert {n: len(windows[n]) for n in counts} == counts
    (tmp_path / "text.txt").write_text(text[:82])
    with pytest.raises(EvaluationError, match="at least 83 tokens"):
        text_windows(settings, counts)
