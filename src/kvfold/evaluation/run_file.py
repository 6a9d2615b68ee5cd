"""`run.json`: what a run was asked for, and by which machine, versions and commit it was answered.

A run that is broken off and goes on, maybe under another commit, keeps a line of each start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvfold.evaluation.configuration import digest
from kvfold.evaluation.environment import environment
from kvfold.evaluation.report import read_json, write_json
from kvfold.evaluation.shapes import RunShape, check_shape

RUN_FILE = "run.json"
REMEDY = (
    "delete it and run the same command again, which keeps the answers, or name another folder if "
    "this is of something else"
)


def read_run_file(folder: Path) -> dict[str, Any]:
    """What `write_run_file` wrote; raises `EvaluationError` for anything else."""
    path = folder / RUN_FILE
    data = read_json(path)
    check_shape(data, RunShape, path, REMEDY)
    return data


def write_run_file(
    folder: Path,
    config: Mapping[str, Any],
    model: Mapping[str, Any],
    tasks: Mapping[str, Any],
    subjects: Sequence[str],
    seed: int,
    peers: Mapping[str, Any],
) -> None:
    """Write `run.json`, with the earlier starts of a run of the same configuration.

    peers: descriptions by name, none for a run without them.
    """
    path = folder / RUN_FILE
    asked = {"seed": seed, "subjects": list(subjects), "model": dict(model), "tasks": dict(tasks)}
    if peers:
        asked["peers"] = dict(peers)
    key = digest(asked)
    here = environment()
    before = read_run_file(folder) if path.exists() else {}
    starts = before.get("starts", []) if before.get("digest") == key else []
    started = {"command": here["command"], "commit": here["commit"], "machine": here["machine"]}
    data = {**here, "digest": key, "config": dict(config), **asked}
    write_json(path, {**data, "starts": [*starts, started]})
