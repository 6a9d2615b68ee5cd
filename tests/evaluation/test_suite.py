"""A run goes on where it was broken off, asks nothing twice, and mixes nothing."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from filelock import FileLock

from kvfold.errors import AddOnError, EvaluationError, ReportError
from kvfold.evaluation.predictions import safe_name
from kvfold.evaluation.runner import PLAIN
from kvfold.evaluation.suite import Suite, hold_run, run_suite
from kvfold.evaluation.tasks.task import Answer
from kvfold.plan import Plan

from .suite_tasks import NextTokenTask, StatedTask, Told

PLAN = Plan.from_dict(
    {"anchors": 2, "window": 4, "depth": [{"method": "csa2", "source": 3, "readers": [4, 5]}]}
)
WIDE = PLAN.replace(window=64)


class Killed(BaseException):
    """Stands for a kill: no code expects it."""


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def suite(model, bare_addon):
    """`suite(*tasks, candidates=...)`: a folding add-on, and one whose window holds everything."""

    def make(*tasks, candidates=None, **more):
        chosen = candidates or {
            "folds": bare_addon(model, PLAN),
            "no-op": bare_addon(model, WIDE),
        }
        return Suite(model, None, chosen, tasks, **more)

    return make


def two_tasks(**more):
    return NextTokenTask(**more), NextTokenTask("other", items=5, chunk=2)


def files(folder):
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_a_run_folder_holds_configuration_answers_and_figures(suite, tmp_path):
    made = run_suite(suite(*two_tasks(), config={"model": "tiny"}), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == json.loads(
        json.dumps(made)
    )
    pairs = [f"{s}/{t}" for s in ("plain", "folds", "no-op") for t in ("even", "other")]
    answers = {f"predictions/{p}{end}" for p in pairs for end in (".jsonl", ".config.json")}
    assert files(tmp_path / "run") == answers | {"metrics.json", "run.json", ".lock"}
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["config"], run["seed"]) == ({"model": "tiny"}, 0)
    assert run["subjects"] == made["subjects"] == [PLAIN, "folds", "no-op"]
    assert run["versions"]["torch"] and run["machine"]["cores"] and len(run["starts"]) == 1
    lines = (tmp_path / "run/predictions/folds/even.jsonl").read_text().splitlines()
    assert [json.loads(line)["item"] for line in lines] == [f"even-{n}" for n in range(12)]
    assert made["results"]["folds"]["even"]["acc"]["count"] == 12


def test_an_addon_that_folds_nothing_is_within_noise_everywhere(suite, tmp_path):
    results = run_suite(suite(*two_tasks()), tmp_path)["results"]
    for by_metric in results["no-op"].values():
        for figure in by_metric.values():
            assert figure["difference"]["within_noise"]
            assert figure["difference"]["verdict"] == "same"
    assert results["folds"]["even"]["size"]["difference"]["differing"] > 0


class KilledAfter(NextTokenTask):
    """Killed when it is asked for the so-manieth time, by all subjects together."""

    def __init__(self, calls, **more):
        super().__init__(**more)
        self.calls = calls

    def answers(self, subject, items):
        self.calls -= 1
        if self.calls < 0:
            raise Killed
        return super().answers(subject, items)


@pytest.fixture(scope="module")
def unbroken(suite, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    run_suite(suite(*two_tasks()), folder)
    return folder


@pytest.mark.parametrize("seed", range(6))
def test_killed_anywhere_and_resumed_gives_the_same_bytes(suite, unbroken, tmp_path, seed):
    draw, broken = random.Random(seed), tmp_path
    tasks = (KilledAfter(draw.randrange(5, 12)), NextTokenTask("other", items=5, chunk=2))
    with pytest.raises(Killed):
        run_suite(suite(*tasks), broken)
    assert not (broken / "metrics.json").exists()
    newest = max(broken.rglob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    whole = newest.read_bytes()
    newest.write_bytes(whole[: draw.randrange(len(whole))])  # also in the middle of a line
    tasks = two_tasks()
    run_suite(suite(*tasks), broken)
    assert 0 < len(tasks[0].asked) < 3 * 12
    for name in ("metrics.json", *(n for n in files(unbroken) if "jsonl" in n)):
        assert (broken / name).read_bytes() == (unbroken / name).read_bytes()
    assert len(json.loads((broken / "run.json").read_text())["starts"]) == 2


def test_killed_while_figures_are_made_asks_nothing_again(suite, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvfold.evaluation.suite.task_figures", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_suite(suite(*two_tasks()), tmp_path)
    tasks = two_tasks()
    run_suite(suite(*tasks), tmp_path)
    assert tasks[0].asked == tasks[1].asked == []


def test_the_same_run_is_not_run_again(suite, tmp_path):
    first, told = two_tasks(), Told()
    run_suite(suite(*first), tmp_path)
    assert len(first[0].asked) == 3 * 12
    before = (tmp_path / "metrics.json").read_bytes()
    again = two_tasks()
    run_suite(suite(*again), tmp_path, watcher=told)
    assert again[0].asked == again[1].asked == []
    assert (tmp_path / "metrics.json").read_bytes() == before
    assert f"even of {PLAIN}: all 12 answers are there, none is asked for again" in told.lines


def test_a_finished_pair_of_another_run_folder_is_copied(suite, tmp_path):
    run_suite(suite(*two_tasks()), tmp_path / "old")
    tasks, told = (NextTokenTask(), NextTokenTask("other", items=6, chunk=2)), Told()
    run_suite(suite(*tasks), tmp_path / "new", reuse=tmp_path, watcher=told)
    assert tasks[0].asked == []
    assert len(tasks[1].asked) == 3 * 6
    old, new = (tmp_path / n / "predictions/folds/even.jsonl" for n in ("old", "new"))
    assert new.read_bytes() == old.read_bytes()
    assert any("with the same settings in" in line for line in told.lines)


def test_an_unfinished_pair_of_another_folder_is_not_copied(suite, tmp_path):
    run_suite(suite(NextTokenTask()), tmp_path / "old")
    path = tmp_path / "old/predictions/folds/even.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    task = NextTokenTask()
    run_suite(suite(task), tmp_path / "new", reuse=tmp_path)
    assert {subject for subject, _ in task.asked} == {"folds"}


def test_changed_settings_are_run_again_and_the_old_answers_kept_apart(suite, tmp_path):
    run_suite(suite(*two_tasks()), tmp_path)
    old = (tmp_path / "predictions/folds/even.jsonl").read_bytes()
    tasks, told = two_tasks(depth=2), Told()
    run_suite(suite(*tasks), tmp_path, watcher=told)
    assert len(tasks[0].asked) == 3 * 12
    assert tasks[1].asked == []
    (line,) = [line for line in told.lines if line.startswith("even of folds")]
    assert "answered anew, since its settings changed (task.settings.depth: null -> 2)" in line
    (moved,) = (tmp_path / "replaced").rglob("folds/even.jsonl")
    assert moved.read_bytes() == old
    back = two_tasks()
    run_suite(suite(*back), tmp_path, reuse=tmp_path)
    assert back[0].asked == []


@pytest.mark.parametrize("change", ["weights", "plan", "seed", "model"])
def test_whatever_answers_depend_on_is_run_again(suite, bare_addon, tiny_model, tmp_path, change):
    model = tiny_model("llama", seed=5)
    first = Suite(model, None, {"folds": bare_addon(model, PLAN)}, [NextTokenTask()])
    run_suite(first, tmp_path)
    task = NextTokenTask()
    changed = {
        "weights": {"candidates": {"folds": bare_addon(model, PLAN, scale=0.2)}},
        "plan": {"candidates": {"folds": bare_addon(model, PLAN.replace(anchors=1))}},
        "seed": {"seed": 1},
        "model": {"model": tiny_model("llama", seed=6)},
    }[change]
    run_suite(replace(first, tasks=[task], **changed), tmp_path)
    asked = {subject for subject, _ in task.asked}
    assert asked == ({"folds"} if change in ("weights", "plan") else {PLAIN, "folds"})


def test_damaged_answers_are_named_by_line(suite, tmp_path):
    run_suite(suite(NextTokenTask()), tmp_path)
    path = tmp_path / "predictions/plain/even.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], "{not JSON}\n", *lines[5:]]))
    with pytest.raises(EvaluationError, match=r"even\.jsonl:5 must be an answer as JSON"):
        run_suite(suite(NextTokenTask()), tmp_path)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(EvaluationError, match=r"even\.jsonl:1 must answer item 'even-0'"):
        run_suite(suite(NextTokenTask()), tmp_path)
    path.write_text("".join([*lines, lines[-1]]))
    with pytest.raises(EvaluationError, match="must have 12 answers; it has 13"):
        run_suite(suite(NextTokenTask()), tmp_path)


def test_answers_of_other_code_stay_and_are_told(suite, tmp_path, monkeypatch):
    run_suite(suite(NextTokenTask()), tmp_path / "old")
    first = json.loads((tmp_path / "old/predictions/plain/even.config.json").read_text())["code"]
    assert len(first) == 1 and len(first[0]["sources"]) == 64
    (tmp_path / "old/predictions/folds/even.jsonl").unlink()
    other = {"commit": "beef", "sources": "0" * 64}
    monkeypatch.setattr("kvfold.evaluation.answering.code_state", lambda: other)
    told, task = Told(), NextTokenTask()
    run_suite(suite(task), tmp_path / "new", reuse=tmp_path, watcher=told)
    assert {subject for subject, _ in task.asked} == {"folds"}
    code = {
        name: json.loads((tmp_path / "new/predictions" / name / "even.config.json").read_text())
        for name in ("plain", "folds")
    }
    assert [data["code"] for data in code.values()] == [first, [other]]
    (line,) = [line for line in told.lines if line.startswith(f"even of {PLAIN}")]
    assert line.endswith(f"; other code made them (commit {first[0]['commit']})")


def test_peers_skip_tasks_that_are_asked_only(suite):
    with pytest.raises(EvaluationError, match="skip tasks that are asked, even; got other"):
        suite(NextTokenTask(), peers_skip=["other"])


def test_answers_without_a_description_are_moved_and_made_anew(suite, tmp_path):
    run_suite(suite(NextTokenTask()), tmp_path)
    (tmp_path / "predictions/plain/even.config.json").unlink()
    task = NextTokenTask()
    run_suite(suite(task), tmp_path)
    assert {subject for subject, _ in task.asked} == {PLAIN}
    assert (tmp_path / "replaced/unknown/plain/even.jsonl").exists()


def test_a_folder_that_another_process_writes_is_refused(suite, tmp_path):
    with (
        FileLock(tmp_path / ".lock", is_singleton=False),
        pytest.raises(EvaluationError, match="one process at a time"),
    ):
        run_suite(suite(NextTokenTask()), tmp_path)


def test_a_folder_stays_held_till_its_holder_is_done(suite, tmp_path):
    with hold_run(tmp_path), pytest.raises(EvaluationError, match="one process at a time"):
        run_suite(suite(NextTokenTask()), tmp_path)
    run_suite(suite(NextTokenTask()), tmp_path)


def test_a_folder_that_was_made_for_nothing_is_gone_again(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("made", "there"):
        with hold_run(tmp_path / name):
            pass
    with hold_run(tmp_path / "used"):
        (tmp_path / "used" / "run.json").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"there", "used"}


def test_figures_that_can_not_be_removed_are_named(suite, tmp_path):
    (tmp_path / "metrics.json").mkdir()
    with pytest.raises(ReportError, match=r"can't remove .*metrics\.json"):
        run_suite(suite(NextTokenTask()), tmp_path)


def test_files_of_something_else_are_neither_removed_nor_replaced(suite, tmp_path):
    run_suite(suite(NextTokenTask()), tmp_path / "ours")
    figures = (tmp_path / "ours" / "metrics.json").read_bytes()
    (tmp_path / "ours" / "run.json").unlink()
    run_suite(suite(NextTokenTask()), tmp_path / "ours")
    assert (tmp_path / "ours" / "metrics.json").read_bytes() == figures
    for name, others in (("metrics", {}), ("run", {"run.json": "{}"}), ("text", {})):
        folder = tmp_path / name
        folder.mkdir()
        held = {"metrics.json": "f1: 0.9" if name == "text" else '{"f1": 0.9}', **others}
        for file, text in held.items():
            (folder / file).write_text(text)
        with pytest.raises(EvaluationError, match=rf"{name}.* (is of no run|not as kvfold)"):
            run_suite(suite(NextTokenTask()), folder)
        assert {file: (folder / file).read_text() for file in held} == held
        assert files(folder) == {*held, ".lock"}


def test_earlier_figures_are_gone_before_the_run_is_described_anew(suite, tmp_path, monkeypatch):
    run_suite(suite(NextTokenTask()), tmp_path)
    monkeypatch.setattr("kvfold.evaluation.suite.write_run_file", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_suite(suite(NextTokenTask()), tmp_path)
    assert not (tmp_path / "metrics.json").exists()


def test_what_parts_are_made_of_must_stand_in_each_answer(suite, tmp_path):
    task = NextTokenTask()
    task.parts = (("length",), ("depth", "length"))
    run_suite(suite(task), tmp_path)
    path = tmp_path / "predictions/folds/even.jsonl"
    path.write_text(path.read_text().replace('"depth"', '"deep"', 1))
    with pytest.raises(EvaluationError, match=r"even\.jsonl:1 .*depth is missing"):
        run_suite(suite(task), tmp_path)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
def test_a_seed_that_no_generator_takes_is_refused_at_once(suite, seed):
    with pytest.raises(EvaluationError, match="64 bits"):
        suite(NextTokenTask(), seed=seed)


def test_a_place_that_can_not_be_a_folder_is_a_clear_error(suite, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="can't make the run folder"):
        run_suite(suite(NextTokenTask()), tmp_path / "file" / "run")


def test_an_addon_of_another_model_is_refused_before_anything_runs(model, bare_addon):
    foreign = bare_addon(model, PLAN)
    foreign.check_base = lambda _: (_ for _ in ()).throw(AddOnError("another model"))
    with pytest.raises(AddOnError):
        Suite(model, None, {"a": foreign}, [NextTokenTask()])


class Careless(NextTokenTask):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def answers(self, subject, items):
        made = super().answers(subject, items)
        if self.fault == "order":
            return made[::-1]
        return [Answer(made[0].item, {"x": {1, 2}}, {"acc": True}), *made[1:]]


@pytest.mark.parametrize(("fault", "words"), [("order", "in order"), ("data", "plain data")])
def test_careless_tasks_are_told_so(suite, tmp_path, fault, words):
    with pytest.raises(EvaluationError, match=words):
        run_suite(suite(Careless(fault)), tmp_path)


def test_a_suite_without_items_or_with_equal_names_is_refused(suite, tmp_path):
    with pytest.raises(EvaluationError, match="at least one item"):
        run_suite(suite(NextTokenTask(items=0)), tmp_path)
    with pytest.raises(EvaluationError, match="each once"):
        suite(NextTokenTask(), NextTokenTask())
    twice = StatedTask({PLAIN: [{}]})
    twice.items = lambda: [{"id": "x"}, {"id": "x"}]
    with pytest.raises(EvaluationError, match=r"\['x'\] twice"):
        run_suite(suite(twice), tmp_path)


def test_names_of_folders_are_safe_and_apart():
    names = [
        PLAIN, "plain", "ced-csa2", "4x", "CED-CSA2", "../../etc", "a/b", "a_b", "a b", "..", "",
        "con", "aux.txt", ".hidden", "ü", "x" * 300, "x" * 301, "a\n", "<script>",
    ]  # fmt: skip
    made = [safe_name(name) for name in names]
    assert made[0] == "plain"
    assert made[2:4] == ["ced-csa2", "4x"]
    assert len({name.lower() for name in made}) == len(names)
    assert all(set(name) & set("/\\ \n<>:") == set() for name in made)
    assert not any(name.startswith(".") or len(name) > 100 for name in made)
