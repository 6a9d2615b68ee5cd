"""`kvfold evaluate --tasks`, `kvfold report` and the gate, from end to end on a tiny model."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from kvfold.cli.suite_options import TASKS
from kvfold.errors import EvaluationError, PeerError
from kvfold.evaluation import configuration, cost
from kvfold.evaluation.page import runs
from kvfold.evaluation.peers import environment
from kvfold.evaluation.suite import hold_run
from kvfold.evaluation.tasks import registry
from kvfold.evaluation.tasks.registry import MAKERS

from ..evaluation.suite_tasks import NextTokenTask


@pytest.fixture(scope="module")
def made_tasks():
    """Settings of every task that was made."""
    return []


@pytest.fixture(scope="module")
def evaluate(kvfold, tiny_folder, addon_folder, made_tasks):
    """`evaluate(...)` with two small tasks in the registry's place."""
    patch = pytest.MonkeyPatch()

    def maker(name):
        def make(settings):
            made_tasks.append(settings)
            return NextTokenTask(name, items=settings.limit or 8, seed=settings.seed)

        return make

    names = {"even": "even", "needle": "needle", "ruler-file": "ruler_file"}
    made = SimpleNamespace(**{stored: maker(stored) for stored in names.values()})
    patch.setitem(sys.modules, "some_tasks", made)
    patch.setattr(registry, "MAKERS", {n: f"some_tasks:{s}" for n, s in names.items()})

    def run(*more, addons=(addon_folder,), tasks="even,needle"):
        chosen = [part for addon in addons for part in ("--addon", addon)]
        return kvfold("evaluate", tiny_folder, *chosen, "--tasks", tasks, "--keep-window", 4, *more)

    yield run
    patch.undo()


@pytest.fixture(scope="module")
def finished(evaluate, tmp_path_factory):
    """A run with cost, what it printed, and its JSON."""
    folder = tmp_path_factory.mktemp("results") / "run"
    done = evaluate(
        "--out", folder, "--lengths", "64,1k", "--speed-lengths", "16", "--json",
        folder.with_name("all.json"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return folder, done


def flat(done):
    return " ".join(done.output.replace("│", " ").split())


def test_a_run_is_answered_shown_and_written(finished, made_tasks):
    folder, done = finished
    data = json.loads(folder.with_name("all.json").read_text())
    assert data["metrics"] == json.loads((folder / "metrics.json").read_text())
    assert data["cost"] == json.loads((folder / "cost.json").read_text())
    assert data["metrics"]["subjects"] == ["no compression", "my-addon"]
    assert data["run"]["config"]["tasks"] == ["even", "needle"]
    assert data["run"]["config"]["plan_changes"] == {"window": 4}
    assert made_tasks[0].lengths == (64, 1024)
    assert made_tasks[0].tokenizer is not None
    assert [m["tokens"] for m in data["cost"]["subjects"]["my-addon"]["memory"]] == [64, 1024]
    assert [s["history"] for s in data["cost"]["subjects"]["my-addon"]["speed"]] == [16]
    value = data["metrics"]["results"]["my-addon"]["even"]["acc"]["value"]
    assert f"my-addon {100 * value:.1f}%" in flat(done)
    assert max(len(line) for line in done.stdout.splitlines()) <= 100


def test_the_same_command_again_keeps_every_answer(evaluate, finished):
    folder, _ = finished
    before = {n: (folder / n).read_bytes() for n in ("metrics.json", "cost.json")}
    done = evaluate("--out", folder, "--lengths", "64,1k", "--speed-lengths", "16")
    assert done.exit_code == 0, done.output
    assert flat(done).count("none is asked for again") == 4
    assert {n: (folder / n).read_bytes() for n in before} == before


def test_all_weights_of_the_model_are_read_once(evaluate, finished, monkeypatch):
    folder, _ = finished
    read, real = [], configuration.weights_digest

    def counted(named):
        read.append([name for name, _ in named])
        return real(named)

    monkeypatch.setattr(configuration, "weights_digest", counted)
    before = (folder / "cost.json").read_bytes()
    done = evaluate("--out", folder, "--lengths", "64,1k", "--speed-lengths", "16")
    assert done.exit_code == 0, done.output
    assert (folder / "cost.json").read_bytes() == before
    assert sum("model.embed_tokens.weight" in names for names in read) == 1


def test_a_report_is_made_as_page_markdown_and_tables(kvfold, finished, tmp_path):
    folder, _ = finished
    page, table = tmp_path / "report.html", tmp_path / "table.md"
    done = kvfold("report", folder, "--out", page, "--markdown", table)
    assert done.exit_code == 0, done.output
    assert page.read_text().startswith("<!doctype html>")
    assert "| my-addon |" in table.read_text()
    shown = kvfold("report", folder, folder)
    assert shown.exit_code == 0
    assert flat(shown).count("even.acc no compression") == 2


@pytest.mark.parametrize(
    ("rule", "status", "words"),
    [
        ("even.acc: {max_drop: 0.99}", 0, "All 1 rules are kept"),
        ("even.ppl: {max_rise: 100}\nneedle.acc: {min: 0}", 0, "All 2 rules are kept"),
        ("even.acc: {max: -1}", 1, "even.acc max my-addon"),
        ("even.accuracy: {min: 0}", 2, "none of my-addon's: even.acc"),
        ("even.acc: {mim: 0}", 2, "got mim"),
    ],
)
def test_the_gate_ends_with_a_status(kvfold, finished, tmp_path, rule, status, words):
    (tmp_path / "rule.yaml").write_text(rule)
    done = kvfold("report", finished[0], "--fail-under", tmp_path / "rule.yaml")
    assert done.exit_code == status, done.output
    assert words in flat(done)
    assert "Traceback" not in done.output


def test_the_gate_of_several_runs_names_those_that_do_not_keep_its_rules(
    kvfold, finished, tmp_path
):
    other = shutil.copytree(finished[0], tmp_path / "other")
    figures = json.loads((other / "metrics.json").read_text())
    figures["results"]["my-addon"]["even"]["acc"]["value"] = -1.0
    (other / "metrics.json").write_text(json.dumps(figures))
    (tmp_path / "rule.yaml").write_text("even.acc: {min: 0}")
    done = kvfold("report", finished[0], other, "--out", tmp_path / "p.html",
                  "--fail-under", tmp_path / "rule.yaml")  # fmt: skip
    assert done.exit_code == 1, done.output
    assert f"{other}:" in flat(done) and f"{finished[0]}:" not in flat(done)
    assert "1 of 2 rules are not kept" in flat(done)


def test_page_and_markdown_can_not_be_one_file(kvfold, finished, tmp_path):
    done = kvfold("report", finished[0], "--out", tmp_path / "a", "--markdown", tmp_path / "b/../a")
    assert done.exit_code == 2 and "name one file" in flat(done)
    assert list(tmp_path.iterdir()) == []


def test_evaluate_itself_can_fail_a_build_and_needs_no_addon(evaluate, tmp_path):
    rule = tmp_path / "rule.yaml"
    rule.write_text("even.acc: {min: 2}")
    done = evaluate(
        "--out", tmp_path / "run", "--no-speed", "--limit", 3, "--fail-under", rule,
        addons=(), tasks="even",
    )  # fmt: skip
    assert done.exit_code == 1, done.output
    assert "1 of 1 rules are not kept" in flat(done)
    cost = json.loads((tmp_path / "run/cost.json").read_text())
    assert cost["subjects"]["no compression"]["speed"] == []


@pytest.mark.parametrize(
    ("options", "tasks", "words"),
    [
        ((), "even", "--out"),
        (("--out", "{}"), "evn", "one of even, needle, ruler-file; got 'evn'"),
        (("--out", "{}"), ",", "at least one task"),
        (("--out", "{}", "--peers", "snapkv"), "even", "expected-attention"),
        (("--out", "{}", "--peers", " "), "even", "at least one peer"),
        (("--out", "{}", "--peers-env", "somewhere"), "even", "--peers-env"),
        (("--out", "{}", "--fraction", 0), "even", "above 0"),
        (("--out", "{}", "--fraction", "nan"), "even", "--fraction"),
        (("--out", "{}", "--data", "x" * 300), "even", "is not there"),
        (("--out", "{}", "--json", "x" * 300), "even", "too long"),
        (("--out", "{}", "--reuse", "x" * 300), "even", "not there"),
        (("--out", "{}", "--window", 64), "even", "--window"),
        (("--out", "{}", "--plot", "p.svg"), "even", "--plot"),
        (("--out", "{}", "--data", "no-such-folder"), "even", "no-such-folder"),
        (("--out", "{}", "--fail-under", "none.yaml"), "even", "none.yaml"),
        (("--out", "{}", "--speed-lengths", "many"), "even", "token counts"),
        (("--out", "{}", "--limit", "0"), "even", "from 1 on"),
        (("--out", "{}", "--limit", "even=few"), "even", "from 1 on"),
        (("--out", "{}", "--limit", "3,4"), "even", "one number a task"),
        (("--out", "{}", "--limit", "9" * 5001), "even", "from 1 on"),
        (("--out", "{}", "--lengths", "9" * 5001), "even", "token counts"),
        (("--out", "{}", "--limit", "needle=4"), "even", "one of needle"),
        (("--out", "{}", "--answer-tokens", "9"), "even", "TASK=N"),
        (("--out", "{}", "--answer-tokens", "even=9"), "even", "gsm8k, ifeval"),
        (("--out", "{}", "--chat-template", "even"), "even", "gsm8k, ifeval"),
        (("--out", "{}", "--peers-skip", "even"), "even", "--peers-skip"),
    ],
)
def test_bad_options_are_explained(evaluate, tmp_path, options, tasks, words):
    done = evaluate(*(str(o).format(tmp_path / "run") for o in options), tasks=tasks)
    assert done.exit_code == 2
    assert words in flat(done)
    assert "Traceback" not in done.output
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--peers", "snapkv=unknown"), "this run has my-addon"),
        (("--peers", "plain", "--peers-skip", "needle"), "that are asked, even; got needle"),
    ],
)
def test_peers_are_checked_before_their_environment_is_made(
    evaluate, tmp_path, monkeypatch, options, words
):
    monkeypatch.setattr(environment, "peer_environment", lambda *_: pytest.fail("was made"))
    done = evaluate("--out", tmp_path / "run", *options, tasks="even")
    assert done.exit_code == 2, done.output
    assert words in flat(done)


def test_a_model_that_no_peer_can_take_is_refused_before_anything_is_answered(
    kvfold, evaluate, hybrid_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(environment, "peer_environment", lambda *_: pytest.fail("was made"))
    done = kvfold(
        "evaluate", hybrid_folder, "--tasks", "even", "--peers", "plain", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.exit_code == 2, done.output
    assert "has linear_attention; leave --peers out" in flat(done)
    assert not (tmp_path / "run").exists()


def test_a_task_goes_by_its_name_on_the_command_line_wherever_it_is_shown(
    evaluate, kvfold, tmp_path
):
    rule, page, table = (tmp_path / name for name in ("rule.yaml", "page.html", "table.md"))
    rule.write_text("ruler-file.acc: {min: 0}")
    told = [
        evaluate(
            "--out", tmp_path / "run", "--no-speed", "--fail-under", rule, addons=(),
            tasks="ruler-file",
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [done.exit_code for done in told] == [0, 0], told[0].output
    assert "ruler-file.acc" in flat(told[0]) and "ruler-file of no compression" in flat(told[1])
    assert "All 1 rules are kept" in flat(told[1])
    assert "ruler_file" not in flat(told[0]) + flat(told[1])
    kvfold("report", tmp_path / "run", "--out", page, "--markdown", table)
    assert "ruler-file: acc" in table.read_text()
    shown = page.read_text()
    assert "<h3>ruler-file <small>" in shown and '<th scope="col">ruler-file<br>' in shown
    assert list(json.loads((tmp_path / "run/metrics.json").read_text())["tasks"]) == ["ruler_file"]


@pytest.mark.parametrize("name", ["ruler-file", "ruler_file"])
def test_peers_can_skip_a_task_by_its_name_on_the_command_line(
    evaluate, tmp_path, monkeypatch, name
):
    def made(*_):
        raise PeerError("the peers are next")

    monkeypatch.setattr(environment, "peer_environment", made)
    done = evaluate(
        "--out", tmp_path / "run", "--peers", "plain", "--peers-skip", name, tasks="ruler-file"
    )
    assert "the peers are next" in flat(done), done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seed", 10**23), "64 bits"),
        (("--fail-under", "{}/task.yaml"), "got one for evne.acc"),
        (("--fail-under", "{}/subject.yaml"), "names my-adon"),
        (("--json", "{}/task.yaml/all.json"), "can't write"),
        (("--json", "{}"), "it is a folder"),
        (("--reuse", "{}/no-such-folder"), "no-such-folder is not there"),
        (("--reuse", "{}/task.yaml"), "task.yaml is a file"),
    ],
)
def test_what_would_fail_at_the_end_fails_before_anything_is_asked(
    evaluate, tmp_path, options, words
):
    (tmp_path / "task.yaml").write_text("evne.acc: {min: 0}")
    (tmp_path / "subject.yaml").write_text("even.acc: {min: 0, subjects: [my-adon]}")
    chosen = (str(option).format(tmp_path) for option in options)
    done = evaluate("--out", tmp_path / "run", "--no-speed", *chosen, tasks="even")
    assert done.exit_code == 2, done.output
    assert words in flat(done)
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


def test_a_folder_to_reuse_may_be_made_by_the_run_itself(evaluate, tmp_path):
    place = tmp_path / "results"
    more = ("--no-speed", "--reuse", place)
    assert evaluate("--out", place / "1", *more, addons=(), tasks="even").exit_code == 0
    done = evaluate("--out", place / "2", *more, addons=(), tasks="even")
    assert done.exit_code == 0, done.output
    assert "answered with the same settings in" in flat(done)


@pytest.mark.parametrize("file", ["run.json", "cost.json", ".lock"])
def test_a_damaged_run_folder_is_told_before_anything_is_asked(evaluate, tmp_path, file):
    (tmp_path / file).mkdir()
    done = evaluate("--out", tmp_path, "--no-speed", tasks="even")
    assert done.exit_code == 2, done.output
    assert file in flat(done)
    assert "Traceback" not in done.output
    assert not (tmp_path / "predictions").exists()


@pytest.mark.parametrize(("module", "name"), [(cost, "write_cost"), (runs, "read_run")])
def test_the_folder_is_held_while_cost_is_measured_and_figures_are_read(
    evaluate, tmp_path, monkeypatch, module, name
):
    real, refused = getattr(module, name), []

    def while_another_tries(*more, **named):
        with pytest.raises(EvaluationError, match="one process at a time") as error:
            hold_run(tmp_path / "run").__enter__()
        refused.append(error)
        return real(*more, **named)

    monkeypatch.setattr(module, name, while_another_tries)
    done = evaluate("--out", tmp_path / "run", "--no-speed", addons=(), tasks="even")
    assert done.exit_code == 0, done.output
    assert len(refused) == 1
    with hold_run(tmp_path / "run"):
        pass


def test_tasks_may_have_limits_of_their_own(evaluate, tmp_path):
    done = evaluate("--out", tmp_path / "run", "--no-speed", "--limit", "4, needle=2", addons=())
    assert done.exit_code == 0, done.output
    tasks = json.loads((tmp_path / "run/metrics.json").read_text())["tasks"]
    assert {name: task["items"] for name, task in tasks.items()} == {"even": 4, "needle": 2}


def test_options_of_a_run_are_refused_without_tasks(kvfold, tiny_folder, addon_folder):
    done = kvfold("evaluate", tiny_folder, "--addon", addon_folder, "--limit", 3)
    assert done.exit_code == 2
    assert "--limit belongs to --tasks" in flat(done)


def test_a_remark_that_would_stand_nowhere_is_refused(kvfold, finished):
    done = kvfold("report", finished[0], "--remark", "made on a Tuesday")
    assert done.exit_code == 2
    assert "name a file with --out or --markdown" in flat(done)


def test_a_folder_that_is_no_run_is_named(kvfold, tmp_path):
    done = kvfold("report", tmp_path)
    assert done.exit_code == 2
    assert "metrics.json" in flat(done)


def test_help_names_every_task():
    assert TASKS.split(", ") == list(MAKERS)
