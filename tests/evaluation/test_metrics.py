"""Figures are made of answers alone, with intervals, and say when a difference is noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import EvaluationError
from kvfold.evaluation.metrics import task_figures
from kvfold.evaluation.resampling import Column, draws, resampled_interval, within_noise
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.share import Share, wilson

from .suite_tasks import StatedTask


def figures(plain, other, seed=0, summary=None):
    task = StatedTask({PLAIN: plain, "a": other})
    if summary is not None:
        task.summary = summary
    return task_figures(task, task.all_answers(), seed=seed)


def right(*answers):
    return [{"acc": bool(answer)} for answer in answers]


def test_an_accuracy_has_the_interval_of_wilson():
    made = figures(right(1, 1, 0, 1), right(1, 0, 0, 1))
    plain = made[PLAIN]["acc"]
    assert (plain.kind, plain.value, plain.right, plain.count) == ("accuracy", 0.75, 3, 4)
    assert plain.interval == pytest.approx(Share(3, 4).interval)
    assert plain.difference is None
    assert made["a"]["acc"].difference.value == pytest.approx(-0.25)


def test_parts_of_a_task_have_intervals_of_their_own_answers():
    task = StatedTask({PLAIN: right(1, 1, 1, 0), "a": right(1, 0, 1, 0)})
    task.parts = (("kind",), ("kind", "length"))
    given = task.all_answers()
    said = [{"kind": kind, "length": length} for kind, length in ("x1", "x2", "y1", "y2")]
    given = {
        name: [replace(a, said=s) for a, s in zip(answers, said, strict=True)]
        for name, answers in given.items()
    }
    made = task_figures(task, given, seed=0)
    names = ["acc", *(f"acc/kind {k}" for k in ("x", "y", "x/length 1", "x/length 2"))]
    assert list(made[PLAIN])[: len(names)] == names
    part = made[PLAIN]["acc/kind x"]
    assert (part.right, part.count, part.interval) == (2, 2, pytest.approx(Share(2, 2).interval))
    difference = made["a"]["acc/kind x"].difference
    assert (difference.value, difference.differing, difference.within_noise) == (-0.5, 1, True)


def test_a_metric_that_was_never_judged_is_no_figure():
    made = figures([{"acc": True, "old": []}], [{"acc": False, "old": []}])
    assert set(made[PLAIN]) == {"acc"}


def test_equal_answers_are_called_the_same_and_within_noise():
    difference = figures(right(*[1, 0] * 20), right(*[1, 0] * 20))["a"]["acc"].difference
    assert (difference.value, difference.interval, difference.differing) == (0, (0, 0), 0)
    assert difference.within_noise
    assert difference.verdict == "same"


@pytest.mark.parametrize(
    ("fallen", "verdict"), [(0, "same"), (5, "within noise"), (6, "lower"), (30, "lower")]
)
def test_a_fall_is_real_only_if_enough_items_fell(fallen, verdict):
    made = figures(right(*[1] * 40), right(*[0] * fallen, *[1] * (40 - fallen)))
    assert made["a"]["acc"].difference.verdict == verdict


def test_as_many_rises_as_falls_are_noise():
    made = figures(right(*[1, 0] * 10), right(*[0, 1] * 10))
    assert made["a"]["acc"].difference.verdict == "within noise"


def test_pairing_finds_a_small_steady_difference_between_items_that_vary_much():
    generator = np.random.default_rng(1)
    base = generator.normal(10, 5, 50)
    plain = [{"loss": float(x)} for x in base]
    other = [
        {"loss": float(x + 0.1 + 0.05 * y)}
        for x, y in zip(base, generator.normal(size=50), strict=True)
    ]
    made = figures(plain, other)
    difference = made["a"]["loss"].difference
    assert difference.verdict == "higher"
    low, high = difference.interval
    assert low <= 0.1 <= high and high - low < 0.1
    assert difference.relative == pytest.approx(difference.value / made[PLAIN]["loss"].value)
    assert made[PLAIN]["loss"].better == "lower"


def test_judgements_of_one_item_count_apart_in_value_and_together_in_the_interval():
    clustered = [{"acc": [True] * 10} if n % 2 else {"acc": [False] * 10} for n in range(10)]
    figure = figures(clustered, clustered)[PLAIN]["acc"]
    assert (figure.value, figure.right, figure.count, figure.items) == (0.5, 50, 100, 10)
    assert figure.interval[1] - figure.interval[0] > 1.5 * np.ptp(Share(50, 100).interval)
    mixed = [{"acc": [True, False] * 5} for _ in range(10)]
    assert figures(mixed, mixed)[PLAIN]["acc"].interval == pytest.approx(Share(50, 100).interval)


def test_if_every_judgement_is_right_only_items_count():
    every = [{"acc": [True] * 10} for _ in range(4)]
    assert figures(every, every)[PLAIN]["acc"].interval == pytest.approx(wilson(1.0, 4))


def test_items_without_a_metric_are_left_out_of_it():
    plain = [{"a": True, "b": 1.0}, {"a": False}, {"b": 3.0, "a": True}]
    made = figures(plain, plain)[PLAIN]
    assert (made["a"].items, made["b"].items, made["b"].value) == (3, 2, 2.0)


def test_a_difference_is_between_the_items_that_both_have():
    made = figures([{"x": 1.0}, {"x": 9.0}, {"y": 1.0}], [{"x": 2.0}, {"y": 1.0}, {"x": 7.0}])
    assert made["a"]["x"].difference.value == pytest.approx(1.0)
    assert made["a"]["y"].difference is None


def test_a_summary_is_resampled_with_its_answers():
    plain = [{"loss": 1 + n / 50} for n in range(20)]
    other = [{"loss": 1.2 + n / 50} for n in range(20)]

    def perplexity(answers):
        losses = [answer.scores["loss"] for answer in answers]
        return {"ppl": math.exp(sum(losses) / len(losses))}

    figure = figures(plain, other, summary=perplexity)["a"]["ppl"]
    assert (figure.kind, figure.better) == ("summary", "lower")
    assert figure.interval[0] < figure.value < figure.interval[1]
    assert figure.difference.verdict == "higher"
    assert figure.difference.relative == pytest.approx(math.exp(0.2) - 1)


def test_rounding_is_no_difference():
    plain = [{"loss": 2.0 + n} for n in range(20)]
    other = [{"loss": 2.0 + n + 1e-7} for n in range(20)]
    made = figures(plain, other, summary=lambda answers: {"n": float(len(answers))})
    assert made["a"]["loss"].difference.verdict == "same"
    assert made["a"]["n"].difference.verdict == "same"


def test_a_figure_of_zero_has_no_relative_difference():
    assert figures([{"kl": 0.0}], [{"kl": 1.0}])["a"]["kl"].difference.relative is None


def test_intervals_follow_from_seed_and_answers_alone():
    plain, other = [{"x": float(n)} for n in range(9)], [{"x": float(n**2)} for n in range(9)]
    assert figures(plain, other) == figures(plain, other)
    assert figures(plain, other)["a"]["x"].interval != figures(plain, other, 1)["a"]["x"].interval


def test_one_item_has_no_interval():
    assert figures([{"kl": 0.5}], [{"kl": 0.7}])["a"]["kl"].interval is None


def test_shares_of_few_items_are_as_uncertain_as_right_and_wrong_answers():
    every = [{"score": 1.0} for _ in range(4)]
    assert figures(every, every)[PLAIN]["score"].interval == pytest.approx(wilson(1.0, 4))


@pytest.mark.parametrize("items", [4, 8, 40])
def test_intervals_of_means_hold_the_true_mean_about_as_often_as_they_say(items):
    generator, held = np.random.default_rng(3), 0
    for _ in range(200):
        drawn = [{"x": float(x)} for x in generator.normal(7, 2, items)]
        low, high = figures(drawn, drawn)[PLAIN]["x"].interval
        held += low <= 7 <= high
    assert 0.9 <= held / 200 <= 0.99


def summed_by_kind(answers):
    """A task's summary: the mean loss of each kind of item."""
    kinds = {answer.said["kind"] for answer in answers}
    return {
        f"ppl/{kind}": float(np.mean([a.scores["loss"] for a in answers if a.said["kind"] == kind]))
        for kind in kinds
    }


def test_a_summary_of_some_items_differs_on_those_alone():
    """However many others there are, and whatever else the answers say."""
    task = StatedTask(
        {
            PLAIN: [{"loss": n / 4, "more": 1.0} for n in range(24)],
            "a": [{"loss": n / 4 + 0.1 * (n < 4)} for n in range(24)],
        }
    )
    task.summary = summed_by_kind
    given = {
        name: [replace(a, said={"kind": "few" if n < 4 else "many"}) for n, a in enumerate(every)]
        for name, every in task.all_answers().items()
    }
    made = task_figures(task, given, seed=0)["a"]
    few, many = made["ppl/few"], made["ppl/many"]
    assert (few.items, few.difference.differing, few.difference.verdict) == (4, 4, "higher")
    assert (many.items, many.difference.differing, many.difference.verdict) == (20, 0, "same")


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([{"x": math.inf}], r"x of item '0', stated of no compression, is inf"),
        ([{"x": True}, {"x": 0.5}], "one kind"),
    ],
)
def test_scores_that_make_no_figure_are_refused(scores, words):
    with pytest.raises(EvaluationError, match=words):
        figures(scores, scores)


def test_a_score_and_a_summary_can_not_share_a_name():
    with pytest.raises(EvaluationError, match="rename one"):
        figures(right(1), right(1), summary=lambda _: {"acc": 1.0})
    with pytest.raises(EvaluationError, match="ppl in the summary of stated"):
        figures(right(1), right(1), summary=lambda _: {"ppl": math.nan})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=20))
def test_intervals_of_shares_hold_their_share(judged):
    sums = np.array([sum(item) for item in judged], dtype=float)
    weights = np.array([len(item) for item in judged], dtype=float)
    column = Column(sums, weights)
    low, high = column.share_interval()
    assert 0 <= low <= column.value + 1e-12
    assert column.value - 1e-12 <= high <= 1


def test_too_few_known_resamples_make_no_interval():
    assert resampled_interval([1.0, math.nan, math.nan], 1.0, 9) is None
    assert resampled_interval([1.0, 1.0, math.nan], 1.0, 9) == (1.0, 1.0)
    assert within_noise(None, 100)
    assert draws(5, 0, "x", 7).shape == (7, 5)


def test_a_collapse_of_a_few_conversations_is_no_noise():
    plain = [{"recalled": [True] * 4 + [False]} for _ in range(4)]
    none = [{"recalled": [False] * 5} for _ in range(4)]
    one = [{"recalled": [True] * 3 + [False] * 2} for _ in range(4)]
    assert figures(plain, none)["a"]["recalled"].difference.verdict == "lower"
    assert figures(plain, one)["a"]["recalled"].difference.verdict == "within noise"


def test_numbers_need_no_count_of_items_that_differ():
    kl = [{"kl": value} for value in (0.15, 0.11, 0.21, 0.13)]
    found = figures([{"kl": 0.0}] * 4, kl)["a"]["kl"].difference
    assert (found.verdict, found.within_noise) == ("higher", False)


@pytest.mark.parametrize(
    ("score", "items"), [(True, 5), (1.0, 5), (True, 1)], ids=["answers", "shares", "one"]
)
def test_so_few_items_that_nothing_can_be_told_are_called_that(score, items):
    plain, other = [{"score": score}] * items, [{"score": type(score)(0)}] * items
    found = figures(plain, other)["a"]["score"].difference
    assert (found.verdict, found.within_noise) == ("too few items", True)
    assert figures(plain, plain)["a"]["score"].difference.verdict == "same"


def test_intervals_stay_where_figures_can_be():
    plain = [{"kl": 0.0, "agreement": 1.0, "right": n < 9} for n in range(10)]
    other = [{"kl": 3.0 * (n == 0), "agreement": n / 10, "right": n > 8} for n in range(10)]
    made = figures(plain, other)["a"]
    assert made["kl"].interval[0] == 0
    assert made["agreement"].interval[1] <= 1
    assert made["right"].difference.interval[0] >= -1


def test_the_interval_of_a_perplexity_is_as_wide_on_both_sides_in_its_logarithm():
    task = StatedTask({PLAIN: [{"loss": float(n % 5)} for n in range(12)]})
    task.summary = lambda answers: {
        "perplexity": math.exp(sum(a.scores["loss"] for a in answers) / len(answers))
    }
    low, high = task_figures(task, task.all_answers(), seed=0)[PLAIN]["perplexity"].interval
    assert low > 1
    assert math.log(high) - 1.75 == pytest.approx(1.75 - math.log(low), rel=0.3)


def test_a_kl_is_no_less_above_that_of_the_plain_model_than_nothing():
    """The plain model's is 0 from itself, so a difference below 0 can't be."""
    kl = [{"kl": value} for value in (0.001, 0.002, 0.9)]
    made = figures([{"kl": 0.0}] * 3, kl)["a"]["kl"]
    assert made.interval[0] == made.difference.interval[0] == 0
    assert made.difference.verdict == "within noise"


def test_conversations_that_change_as_a_whole_count_as_one_answer_each():
    plain, fallen = {"acc": [True] * 5}, {"acc": [False] * 5}
    half = figures([plain] * 6, [fallen, plain] * 3)["a"]["acc"].difference
    assert half.verdict == "within noise"
    assert figures([plain] * 6, [fallen] * 6)["a"]["acc"].difference.verdict == "lower"


def numbers(generator):
    return [{"x": float(x)} for x in generator.normal(0, 1, 4)]


def single_answers(generator):
    return [{"x": bool(x < 0.6)} for x in generator.random(15)]


def shares(generator):
    return [{"x": 0.0, "score": float(x)} for x in generator.integers(0, 3, 10) / 2]


def few_conversations(generator):
    return [{"x": [bool(x < 0.6) for x in generator.random(5)]} for _ in range(4)]


def whole_conversations(generator):
    return [{"x": [bool(generator.random() < 0.6)] * 5} for _ in range(6)]


@pytest.mark.parametrize(
    "drawn", [numbers, single_answers, shares, few_conversations, whole_conversations]
)
def test_subjects_that_are_as_good_are_seldom_told_apart(drawn):
    """One in 20 at most, and what 300 runs of that vary by."""
    generator, told = np.random.default_rng(5), 0
    for _ in range(300):
        made = figures(drawn(generator), drawn(generator))["a"]
        told += made.get("score", made["x"]).difference.verdict in ("higher", "lower")
    assert told / 300 <= 0.09


def test_a_perplexity_is_at_least_one_however_few_windows_tell_it():
    task = StatedTask({PLAIN: [{"loss": x} for x in (0.01, 0.02, 2.5)]})
    task.summary = lambda answers: {
        "perplexity": math.exp(sum(a.scores["loss"] for a in answers) / len(answers))
    }
    made = task_figures(task, task.all_answers(), seed=0)[PLAIN]["perplexity"]
    assert made.interval[0] == 1 < made.value < made.interval[1]
