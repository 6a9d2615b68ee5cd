"""Recall counts whole answers, and generates the same ones however prompts are batched."""

from __future__ import annotations

import pytest
import torch

from kvfold import attach
from kvfold.errors import EvaluationError
from kvfold.evaluation.metrics import task_figures
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.share import Share
from kvfold.evaluation.tasks.recall import RecallReport, make, recall, score
from kvfold.evaluation.tasks.settings import TaskSettings
from kvfold.evaluation.tasks.task import Subject
from kvfold.evaluation.tiny_language import RECALL_KINDS, VOCABULARY, RecallPrompt, recall_prompt
from kvfold.presets import preset

LENGTHS = (80, 96)


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each word of the language."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(VOCABULARY)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<doc>")


@pytest.fixture(scope="module")
def model(tiny_model):
    """A tiny random hybrid with more ids than words, as a padded vocabulary has."""
    size = -(-len(VOCABULARY) // 16) * 16
    made = tiny_model("qwen3_5", dtype=torch.float64, vocab_size=size)
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture(scope="module")
def prompts():
    return [recall_prompt(f"test {n}", kind, n) for n in LENGTHS for kind in RECALL_KINDS]


def own_words(model, tokenizer, prompt):
    """What the model says to a prompt, word by word, by the argmax of whole forwards."""
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(list(prompt.words))])
    for _ in prompt.answer:
        with torch.no_grad():
            best = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], dim=1)
    return tuple(tokenizer.convert_ids_to_tokens(ids[0, len(prompt.words) :].tolist()))


def test_a_random_model_recalls_nothing(model, tokenizer, prompts):
    report = recall(model, prompts, tokenizer)
    assert report.share() == Share(0, len(prompts))
    assert report.by_kind() == dict.fromkeys(RECALL_KINDS, Share(0, len(LENGTHS)))


def test_a_prompt_whose_answer_is_what_the_model_says_is_right(model, tokenizer, prompts):
    said = [own_words(model, tokenizer, prompt) for prompt in prompts]
    known = [
        RecallPrompt(prompt.kind, prompt.words, words, prompt.fact)
        for prompt, words in zip(prompts, said, strict=True)
        if None not in words
    ]
    assert len(known) > 3
    report = recall(model, known, tokenizer)
    assert report.share() == Share(len(known), len(known))


@pytest.mark.parametrize("batch", [1, 3])
def test_answers_do_not_depend_on_the_batch(model, tokenizer, prompts, batch):
    whole = recall(model, prompts, tokenizer)
    assert recall(model, prompts, tokenizer, batch=batch).answers == whole.answers
    assert [len(a) for a in whole.answers] == [len(p.answer) for p in prompts]


def test_an_add_on_that_changes_nothing_answers_as_the_plain_model(
    model, tokenizer, prompts, bare_addon
):
    from kvfold.anatomy import anatomy

    plain = recall(model, prompts, tokenizer).answers
    plan = preset("identity", anatomy(model)).replace(window=16)
    with attach(model, bare_addon(model, plan)):
        assert recall(model, prompts, tokenizer).answers == plain


def test_only_the_whole_answer_is_right(prompts):
    answers = [prompt.answer for prompt in prompts]
    assert score(prompts, answers).share() == Share(8, 8)
    answers[0] = (*answers[0][:-1], "and")
    answers[1] = answers[1][:-1]
    answers[2] = (*answers[2], ".")
    answers[3] = (None, *answers[3][1:])
    report = score(prompts, answers)
    assert report.right == (False,) * 4 + (True,) * 4
    assert report.share() == Share(4, 8)
    assert report.by_kind() == dict.fromkeys(RECALL_KINDS, Share(1, 2))


def test_shares_before_and_after_a_boundary_leave_out_what_stands_across_it():
    def prompt(start):
        return RecallPrompt("value", ("w",) * start, ("a", "."), (start, start + 6))

    prompts = [prompt(start) for start in (0, 4, 8, 10, 20)]
    answers = [p.answer if p.fact[0] in (4, 20) else ("b", ".") for p in prompts]
    before, after = score(prompts, answers).split_at(10)
    assert before == Share(1, 2)
    assert after == Share(1, 2)


def test_a_kind_that_was_not_asked_has_no_share(prompts):
    values = [prompt for prompt in prompts if prompt.kind == "value"]
    assert set(score(values, [p.answer for p in values]).by_kind()) == {"value"}


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_the_interval_is_wilsons(right, count, low, high):
    assert Share(right, count).interval == pytest.approx((low, high), abs=1e-4)


def test_of_nothing_there_is_no_share():
    assert Share(0, 0).value is None
    assert Share(0, 0).interval == (0.0, 1.0)
    assert Share(0, 0).to_dict()["share"] is None


def test_plain_data_has_every_share(prompts):
    data = score(prompts, [prompt.answer for prompt in prompts]).to_dict()
    assert data["overall"]["share"] == 1.0
    assert data["by_kind"]["copy"]["count"] == 2


def test_answers_without_prompts_are_refused(prompts, model, tokenizer):
    with pytest.raises(EvaluationError, match="got 0 answers to 8 prompts"):
        score(prompts, [])
    with pytest.raises(EvaluationError, match="got 0 answers to 0 prompts"):
        recall(model, [], tokenizer)


def test_a_tokenizer_of_another_language_is_refused(model, prompts, tokenizer):
    strange = RecallPrompt("value", ("<doc>", "zebra"), ("a", "."), (0, 1))
    with pytest.raises(EvaluationError, match="'zebra'"):
        recall(model, [*prompts, strange], tokenizer)


def test_a_report_keeps_the_order_of_the_prompts(prompts):
    report = score(prompts[::-1], [p.answer for p in prompts[::-1]])
    assert isinstance(report, RecallReport)
    assert report.prompts == tuple(prompts[::-1])


def test_the_task_asks_every_kind_at_every_length_and_the_tiny_hybrid_knows():
    from kvfold.models import tiny_hybrid

    model, tokenizer = tiny_hybrid()
    task = make(TaskSettings(None, limit=16, tokenizer=tokenizer, lengths=(96, 128)))
    assert {(i["kind"], i["length"]) for i in task.items()} == {
        (kind, length) for kind in RECALL_KINDS for length in (96, 128)
    }
    found = task.answers(Subject("plain", model, tokenizer), task.items())
    assert sum(answer.scores["accuracy"] for answer in found) >= 14
    first = task.items()[0]
    alone = task.answers(Subject("plain", model, tokenizer), [first])
    assert [answer.to_dict() for answer in alone] == [found[0].to_dict()]
    strange = {**first, "answer": ["and", *first["answer"][1:]]}
    (wrong,) = task.answers(Subject("plain", model, tokenizer), [strange])
    assert wrong.scores == {"accuracy": False}
    figures = task_figures(task, {PLAIN: found}, seed=0)[PLAIN]
    assert figures["accuracy/length 96"].count == figures["accuracy/length 128"].count == 8
    assert figures["accuracy/kind copy"].kind == "accuracy"


def test_the_task_speaks_its_own_language_only(characters):
    with pytest.raises(EvaluationError, match="tiny hybrid's own language"):
        make(TaskSettings(None, tokenizer=characters))
    from kvfold.models import load_tokenizer

    with pytest.raises(EvaluationError, match="long enough for a fact and a question"):
        make(TaskSettings(None, tokenizer=load_tokenizer("tiny-hybrid"), lengths=(10,)))
