"""Where figures come from."""

from __future__ import annotations

import subprocess

from kvfold.evaluation import environment as module
from kvfold.evaluation.environment import environment


def test_the_environment_names_machine_versions_and_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/some/where/kvfold", "evaluate", "a model"])
    found = environment()
    assert found["command"] == "kvfold evaluate 'a model'"
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["python"].startswith("3.")
    assert found["versions"]["kvfold"]


def test_no_git_means_no_commit(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment()["commit"] is None


def test_a_changed_tree_is_said_to_be_changed(monkeypatch):
    answers = {"rev-parse": "abc123", "status": " M src/kvfold/plan.py"}
    monkeypatch.setattr(module, "_git", lambda _, command, *__: answers[command])
    assert module._commit() == "abc123 with uncommitted changes"
    answers["status"] = ""
    assert module._commit() == "abc123"
