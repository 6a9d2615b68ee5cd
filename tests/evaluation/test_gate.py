"""A gate passes what keeps its rules, fails what doesn't, and never passes what can't be told."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from kvfold.errors import EvaluationError
from kvfold.evaluation.gate import Rule, check_asked, check_rules, read_rules
from kvfold.evaluation.metrics import task_figures
from kvfold.evaluation.page.table import failures_table
from kvfold.evaluation.runner import PLAIN

from .suite_tasks import StatedTask


@pytest.fixture(scope="module")
def metrics():
    """Plain 60% and a loss of 2; `a` 58% and 2.05; `b` 20% and 4; a `kl` of 0 for plain."""

    def scores(right, loss, kl):
        return [{"acc": number < right, "loss": loss, "kl": kl} for number in range(50)]

    task = StatedTask(
        {PLAIN: scores(30, 2.0, 0.0), "a": scores(29, 2.05, 0.1), "b": scores(10, 4.0, 0.5)}
    )
    made = task_figures(task, task.all_answers(), seed=0)
    results = {
        name: {"stated": {key: figure.to_dict() for key, figure in figures.items()}}
        for name, figures in made.items()
    }
    return json.loads(json.dumps({"plain": PLAIN, "subjects": list(results), "results": results}))


@pytest.fixture
def checked(tmp_path, metrics):
    def run(text, over=None):
        path = tmp_path / "rule.yaml"
        path.write_text(text, encoding="utf-8")
        return check_rules(read_rules(path), over or metrics)

    return run


def outcome(checks):
    return {check.subject: check.passed for check in checks}


@pytest.mark.parametrize(
    ("rule", "passes"),
    [
        ("{max_drop: 0.02}", {"a": True, "b": False}),
        ("{max_drop: 0.019}", {"a": False, "b": False}),
        ("{max_drop: 0.4}", {"a": True, "b": True}),
        ("{max_drop: 0.02, subjects: [a]}", {"a": True}),
        ("{min: 0.58}", {"a": True, "b": False}),
        ("{max: 0.3}", {"a": False, "b": True}),
        (f"{{min: 0.6, subjects: [{PLAIN}]}}", {PLAIN: True}),
    ],
)
def test_rules_for_an_accuracy_are_in_its_own_points(checked, rule, passes):
    assert outcome(checked(f"stated.acc: {rule}")) == passes


@pytest.mark.parametrize(
    ("limit", "passes"), [(0.025, (True, False)), (0.02, (False, False)), (1, (True, True))]
)
def test_rises_of_other_figures_are_fractions_of_the_plain_models(checked, limit, passes):
    checks = checked(f"stated.loss: {{max_rise: {limit}}}")
    assert tuple(check.passed for check in checks) == passes
    assert checks[0].measured == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"a.b: {{min: {'9' * 400}}}", "min must be a number; got 9999"),
        (f"a.b: {{min: {'9' * 5000}}}", "valid YAML or JSON"),
        (f"a.b: {{min: 0x{'f' * 5000}}}", "min must be a number; got a number of very many"),
        ("a.b: &x [*x]", r"with one of max_drop, .*; got \[\["),
        ("a.b: &x {min: *x}", "min must be a number; got"),
        ("a.b: {min: 2020-13-41}", "valid YAML or JSON"),
        (f"a.b: {'[' * 2000}{']' * 2000}", "nested so deeply"),
    ],
)
def test_rules_that_have_no_end_or_no_float_are_refused_in_a_few_words(checked, text, words):
    with pytest.raises(EvaluationError, match=words) as refused:
        checked(text)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("name", ["ruler-file", "ruler_file"])
def test_a_task_may_be_named_as_on_the_command_line(checked, metrics, name):
    renamed = json.loads(json.dumps(metrics).replace('"stated"', '"ruler_file"'))
    (check,) = checked(f"{name}.acc: {{min: 0.5, subjects: [a]}}", renamed)
    assert check.passed and check.rule.metric == "ruler-file.acc"
    with pytest.raises(EvaluationError, match=r"none of a's: ruler-file\.acc"):
        checked(f"{name}.none: {{min: 0.5}}", renamed)


def test_several_rules_of_a_metric_are_all_checked(checked):
    checks = checked(
        "stated.acc:\n- {max_drop: 0.02, subjects: [a]}\n- {min: 0.1, max: 0.5, subjects: [b]}\n"
    )
    assert [(c.subject, c.rule.bound, c.passed) for c in checks] == [
        ("a", "max_drop", True), ("b", "min", True), ("b", "max", True),
    ]  # fmt: skip
    assert (checks[0].within_noise, checks[0].verdict) == (True, "within noise")
    assert checks[0].to_dict()["limit"] == 0.02
    assert checks[1].to_dict()["verdict"] == "lower"


def test_a_rule_on_too_few_items_to_tell_says_so_and_not_that_it_is_noise():
    task = StatedTask({PLAIN: [{"acc": True}] * 4, "a": [{"acc": False}] * 4})
    made = task_figures(task, task.all_answers(), seed=0)
    results = {
        name: {"stated": {key: figure.to_dict() for key, figure in figures.items()}}
        for name, figures in made.items()
    }
    over = {"plain": PLAIN, "subjects": list(results), "results": results}
    checks = check_rules([Rule("stated.acc", "max_drop", 0.1)], over)
    assert [(c.passed, c.verdict) for c in checks] == [(False, "too few items")]
    screen = Console(file=StringIO(), width=200)
    screen.print(failures_table(checks))
    printed = screen.file.getvalue()
    assert "too few items to tell" in printed
    assert "noise" not in printed


def test_a_rule_that_names_nobody_is_not_for_peers(checked, metrics):
    with_peer = {**metrics, "peers": ["b"]}
    assert outcome(checked("stated.acc: {min: 0.5}", with_peer)) == {"a": True}
    named = "stated.acc: {min: 0.5, subjects: [b]}"
    assert outcome(checked(named, with_peer)) == {"b": False}


def test_the_plain_model_alone_can_be_held_to_limits(checked, metrics):
    alone = {**metrics, "subjects": [PLAIN]}
    assert outcome(checked("stated.acc: {min: 0.5}", alone)) == {PLAIN: True}
    with pytest.raises(EvaluationError, match="no difference"):
        checked("stated.acc: {max_drop: 0.5}", alone)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stated.accuracy: {min: 0.5}", r"'stated.accuracy' is none of a's: stated.acc"),
        ("lambada.acc: {min: 0.5}", "lambada.acc"),
        ("stated.acc: {min: 0.5, subjects: [c]}", "names c; this run has"),
        ("stated.kl: {max_rise: 0.5}", "fraction of the plain model's figure, which is 0.0"),
        ("acc: {min: 0.5}", "named as task.metric"),
        ("stated.acc: 0.5", "must be a mapping with one of max_drop"),
        ("stated.acc: {}", "must be a mapping with one of max_drop"),
        ("stated.acc: {subjects: [a]}", "must be a mapping with one of max_drop"),
        ("stated.acc: []", "at least one"),
        ("stated.acc: {max_fall: 0.5}", "got max_fall"),
        ("stated.acc: {min: much}", "min must be a number; got 'much'"),
        ("stated.acc: {min: .nan}", "must be a number"),
        ("stated.acc: {min: yes}", "must be a number"),
        ("stated.acc: {max_drop: -0.1}", "at least 0"),
        ("stated.acc: {max_drop: 2}", "below 1, .*; got 2; 0.02 is two points"),
        ("stated.acc: {min: 0.5, subjects: a}", "subjects must be a list"),
        ("stated.acc: {min: 0.5, subjects: []}", "subjects must be a list"),
        ("stated.acc: {min: 0.5}\nstated.acc: {min: 0.1}", r"rule\.yaml:2: 'stated.acc' is there"),
        ("stated.acc: {min: 0.5, min: 0.1}", "'min' is there twice"),
        ("stated.acc: {min: 0.5", "valid YAML"),
        ("", "at least one"),
        ("- stated.acc", "must be a mapping"),
        ("1: {min: 0.5}", "named as task.metric"),
        ("? [a, b]\n: {min: 0.5}", "rule"),
    ],
)
def test_bad_rules_are_clear_errors(checked, text, words):
    with pytest.raises(EvaluationError, match=words):
        checked(text)


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(EvaluationError, match=r"can't read the rules .*none\.yaml"):
        read_rules(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("ü: {min: 1}".encode("latin-1"))
    with pytest.raises(EvaluationError, match=r"latin\.yaml"):
        read_rules(tmp_path / "latin.yaml")


def test_rules_of_what_is_not_asked_are_refused_beforehand(tmp_path):
    rule = Rule("even.acc", "min", 0.5, ("a",))
    check_asked([rule], ["even", "odd"])
    check_asked([rule], ["even"], [PLAIN, "a"])
    check_asked([Rule("even.acc", "min", 0.5)], ["even"], [PLAIN])
    with pytest.raises(EvaluationError, match=r"a task that is asked, odd; got one for even\.acc"):
        check_asked([rule], ["odd"])
    with pytest.raises(EvaluationError, match="names a; this run has no compression, b"):
        check_asked([rule], ["even"], [PLAIN, "b"])


@pytest.mark.parametrize("bound", ["max_drop", "max_rise"])
def test_bounds_of_the_plain_models_difference_from_itself_are_refused_beforehand(bound):
    every = Rule("even.acc", bound, 0.5)
    check_asked([every], ["even"], [PLAIN, "a"], ["plain"])
    named = Rule("even.acc", bound, 0.5, ("a", PLAIN))
    for rule, subjects in ((every, [PLAIN]), (named, [PLAIN, "a"])):
        with pytest.raises(EvaluationError, match="no compression has no difference"):
            check_asked([rule], ["even"], subjects, ["plain"])
