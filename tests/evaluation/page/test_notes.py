"""What must be known before figures are compared is said of the runs that it is true of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvfold.evaluation.page.notes import notes_of
from kvfold.evaluation.page.runs import Run
from kvfold.evaluation.runner import PLAIN


def run_of(figures=None, described=None, **metrics):
    """A run of the plain model and `a`, with figures of the plain model by task and metric."""
    tasks = {task: {"settings": {}} for task in figures or {}}
    results = {
        PLAIN: {
            task: {metric: {"kind": kind, "value": value} for metric, kind, value in some}
            for task, some in (figures or {}).items()
        },
        "a": {},
    }
    whole = {"subjects": [PLAIN, "a"], "plain": PLAIN, "tasks": tasks, "results": results}
    return Run(Path(), {}, whole | metrics, {}, {}, described or {})


def answered(plan=None, commit="c0ffee", sources="0" * 64):
    return {
        "configuration": {"addon": None if plan is None else {"plan": plan}},
        "code": [{"commit": commit, "sources": sources}],
    }


def test_a_task_that_the_plain_model_can_not_do_is_told_with_its_parts():
    figures = {
        "ruler": [
            ("score", "mean", 0.4),
            ("score/kind variable_tracking", "mean", 0.01),
            ("score/kind variable_tracking/length 512", "mean", 0.0),
            ("score/length 512", "mean", 0.3),
        ],
        "gsm8k": [
            ("em,strict", "accuracy", 0.02),
            ("em,flexible", "accuracy", 0),
        ],
        "perplexity": [("loss", "mean", 0.01)],
        "needle": [("accuracy", "accuracy", 0.9)],
    }
    ruler, gsm8k = notes_of(run_of(figures))
    assert ruler.startswith("ruler: the plain model itself is at the floor in ")
    assert "score/kind variable_tracking (1.0%);" in ruler
    assert "em,strict (2.0%), em,flexible (0.0%);" in gsm8k


def test_a_part_of_the_items_is_told():
    run = run_of()
    (note,) = notes_of(dataclasses.replace(run, about={"config": {"fraction": 0.05}}))
    assert note.startswith("Only 5.0% of the items")
    assert not notes_of(dataclasses.replace(run, about={"config": {"fraction": 1.0}}))


def test_a_limit_is_told_as_well():
    run = dataclasses.replace(run_of(), about={"config": {"limit": "200,gsm8k=20"}})
    (note,) = notes_of(run)
    assert note.startswith("No more items were asked than --limit 200,gsm8k=20 lets")
    assert not notes_of(dataclasses.replace(run, about={"config": {"limit": None}}))


def test_a_file_of_which_some_lines_are_asked_is_told_by_the_tasks_own_name():
    run = run_of({"ruler_file": []})
    run.metrics["tasks"]["ruler_file"] |= {"items": 20, "settings": {"of_lines": 500}}
    (note,) = notes_of(run)
    assert note.startswith("ruler-file: 20 of the file's 500 prompts") and "at most 20" in note
    run.metrics["tasks"]["ruler_file"]["settings"]["of_lines"] = 20
    assert not notes_of(run)


def test_prompts_that_are_read_exactly_are_told():
    described = {
        (PLAIN, "t"): answered(),
        ("a", "t"): answered({"prefill_attention": "exact"}),
    }
    (note,) = notes_of(run_of(described=described))
    assert note.startswith("a: prompts are read exactly") and "first token" in note
    described["a", "t"] = answered({"prefill_attention": "folded"})
    assert notes_of(run_of(described=described)) == ()


def test_add_ons_that_may_have_folded_nothing_are_told():
    described = {("a", "t"): answered({"anchors": 4, "window": 128})}
    made = run_of({"t": [("acc", "accuracy", 0.6)]}, described)
    for differing, said in ((0, 1), (2, 0)):
        difference = {"differing": differing}
        made.metrics["results"]["a"] = {
            "t": {"acc": {"kind": "accuracy", "difference": difference}}
        }
        notes = notes_of(made)
        assert len(notes) == said
    made.metrics["results"]["a"]["t"]["acc"]["difference"]["differing"] = 0
    assert "every score of a is the plain model's" in notes_of(made)[0]
    assert "up to 132 tokens" in notes_of(made)[0] and "is not known here" in notes_of(made)[0]
    short = dataclasses.replace(made, lengths={"t": (100, 132)})
    assert "up to 132 tokens" in notes_of(short)[0] and "not known" not in notes_of(short)[0]


def test_prompts_that_were_folded_are_not_called_too_short_to_be():
    described = {("a", "t"): answered({"anchors": 4, "window": 128})}
    made = run_of({"t": [("acc", "accuracy", 0.6)]}, described)
    same, rounded = {"differing": 0}, {"differing": 1}
    made.metrics["results"]["a"]["t"] = {
        "acc": {"kind": "accuracy", "difference": same},
        "perplexity": {"kind": "summary", "difference": rounded},
    }
    (note,) = notes_of(dataclasses.replace(made, lengths={"t": (512, 2048)}))
    assert note == "t: every score of a is the plain model's."


def test_answers_of_other_code_are_named():
    same = {(PLAIN, task): answered() for task in ("t", "u")}
    assert notes_of(run_of(described=same)) == ()
    other = same | {("a", "t"): answered(commit="beef", sources="1" * 64)}
    (note,) = notes_of(run_of(described=other))
    assert "(beef, sources 111111111111; the others by c0ffee" in note
    assert note.endswith("): t of a.")


def test_answers_of_another_commit_than_the_runs_are_named():
    described = {(PLAIN, task): answered() for task in ("t", "u")}
    run = dataclasses.replace(run_of(described=described), about={"commit": "beef"})
    (note,) = notes_of(run)
    assert note.startswith("Answered by commit c0ffee") and note.endswith("start: all answers.")
    assert "beef" in note
    described["a", "t"] = answered(commit="beef")
    (note,) = notes_of(dataclasses.replace(run, described=described))
    assert note.endswith(": t of no compression, u of no compression.")
    assert notes_of(dataclasses.replace(run, about={"commit": "c0ffee"}, described={})) == ()


def test_the_commit_that_measured_costs_is_named_where_it_is_not_the_runs():
    run = dataclasses.replace(run_of(), about={"commit": "beef"})
    code = {"commit": "beef", "sources": "0" * 64}
    assert notes_of(dataclasses.replace(run, cost={"code": code})) == ()
    older = dataclasses.replace(run, cost={"code": {**code, "commit": "c0ffee"}})
    (note,) = notes_of(older)
    assert note.startswith("Bytes and times were measured by commit c0ffee, and not by beef")
    (note,) = notes_of(dataclasses.replace(run, cost={"subjects": {}}))
    assert "no commit beside them" in note


def test_tasks_that_peers_are_not_asked_are_told_once_for_all_of_them():
    unanswered = {name: {"turns": "once"} for name in ("p", "q")}
    notes = notes_of(run_of(peers=["p", "q"], unanswered=unanswered))
    assert notes[-1] == "p, q: not asked turns: once."
    assert sum("not asked" in note for note in notes) == 1


def test_answers_that_were_cut_are_told():
    made = run_of({"ifeval": []})
    made.metrics["tasks"]["ifeval"]["settings"]["answers_cut_at"] = 512
    (note,) = notes_of(made)
    assert note.startswith("ifeval: every subject's answers end after 512 tokens")


def test_tasks_whose_prompts_are_in_a_chat_template_are_told_once():
    made = run_of({"ifeval": [], "gsm8k": [], "lambada": []})
    for task in ("ifeval", "gsm8k"):
        made.metrics["tasks"][task]["settings"]["chat_template"] = "digest"
    (note,) = notes_of(made)
    assert note.startswith("ifeval, gsm8k: prompts are put into the tokenizer's chat template")
