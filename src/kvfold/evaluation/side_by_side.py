"""Pairs of subject and task answered by several processes at once, into one run folder.

One thread a process and as many processes as cores make more of a small model than all cores on
one forward. Each helper builds the whole suite for itself, which takes as much memory as a run
does, and asks for a pair whenever it has none; it gets one of the subject that it has ready, if
one is left. Answers go straight into their files, so a run that is broken off goes on as any other.

The process that holds the run folder starts the helpers. They end with it, however it ends:
otherwise they would write on into a folder that nobody holds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvfold.errors import EvaluationError, KvfoldError
from kvfold.evaluation.answering import Desk, Pair, Watcher, predictions
from kvfold.evaluation.peers.process import GO_ON
from kvfold.evaluation.predictions import Predictions

if TYPE_CHECKING:
    from kvfold.evaluation.suite import Suite


@dataclass(frozen=True)
class Helpers:
    """count: processes, at least 1; with 1 the run itself answers.

    make: builds the suite anew in another process: a function of a module, or a
    `functools.partial` of one with plain data.
    """

    count: int
    make: Callable[[], Suite]

    def __post_init__(self) -> None:
        """Raise `EvaluationError` for no process."""
        if self.count < 1:
            raise EvaluationError(f"jobs must be at least 1; got {self.count}")


def answer_side_by_side(
    helpers: Helpers, folder: Path, wanting: Mapping[Pair, Predictions], told: Watcher
) -> None:
    """Answer pairs, of which there is at least one, in at most as many helpers as there are pairs.

    Raises what a helper raised, and `EvaluationError` for one that died.
    """
    todo = list(wanting)
    with _started(helpers, folder, len(todo)) as processes:
        at: dict[Connection, Pair | None] = dict.fromkeys(processes)
        while at:
            for link in wait(list(at)):
                assert isinstance(link, Connection)
                kind, what = _heard(link, processes[link], at[link])
                if kind == "failed":
                    raise what
                if kind != "ready":
                    getattr(told, kind)(*what)
                    continue
                pair = _next(todo, at[link], at.values())
                link.send(None if pair is None else (pair, wanting[pair].digest))
                if pair is None:
                    processes[link].join()
                    del at[link]
                else:
                    at[link] = pair


def _next(todo: list[Pair], last: Pair | None, others: Iterable[Pair | None]) -> Pair | None:
    """Take a pair: of the same subject, else of one that nobody is at, else any."""
    busy = {pair[0] for pair in others if pair is not None}
    own = [pair for pair in todo if last is not None and pair[0] == last[0]]
    free = [pair for pair in todo if pair[0] not in busy]
    chosen = next(iter([*own, *free, *todo]), None)
    if chosen is not None:
        todo.remove(chosen)
    return chosen


def _heard(link: Connection, process: SpawnProcess, pair: Pair | None) -> tuple[str, Any]:
    try:
        found: tuple[str, Any] = link.recv()
    except (EOFError, ConnectionError):
        process.join()
        what = "to start" if pair is None else f"{pair[1]} of {pair[0]}"
        raise EvaluationError(
            f"a process that had {what} ended with status {process.exitcode}; what it said is "
            f"above; {GO_ON}"
        ) from None
    return found


@contextmanager
def _started(helpers: Helpers, folder: Path, most: int) -> Iterator[dict[Connection, SpawnProcess]]:
    """Helpers by the link to each; those that are still there at the end are ended."""
    context = multiprocessing.get_context("spawn")
    count = min(helpers.count, most)
    threads = max(1, torch.get_num_threads() // count)
    processes: dict[Connection, SpawnProcess] = {}
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_help,
                args=(helpers.make, folder, theirs, threads),
                name=f"helper {number + 1}",
            )
            process.start()
            theirs.close()
            processes[ours] = process
        yield processes
    finally:
        for link, process in processes.items():
            process.terminate()
            process.join()
            link.close()


class _Far:
    """Tells the process that started this one."""

    def __init__(self, link: Connection) -> None:
        self.link = link

    def progress(self, *what: Any) -> None:
        """So many of a pair's items are answered."""
        self.link.send(("progress", what))

    def say(self, line: str) -> None:
        """Something that a user should know."""
        self.link.send(("say", (line,)))


def _help(make: Callable[[], Suite], folder: Path, link: Connection, threads: int) -> None:
    """What a helper does, till there is no pair left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        suite = make()
        pairs = predictions(suite, folder)
        with Desk(suite, _Far(link)) as desk:
            link.send(("ready", None))
            while (given := link.recv()) is not None:
                pair, digest = given
                _check(pairs, pair, digest)
                done, _ = pairs[pair].open()
                desk.answer(pair, pairs[pair], done)
                link.send(("ready", None))
    except KvfoldError as error:
        link.send(("failed", error))


def _check(pairs: Mapping[Pair, Predictions], pair: Pair, digest: str) -> None:
    if pair not in pairs or pairs[pair].digest != digest:
        raise EvaluationError(
            f"helpers must ask what the run asks; {pair[1]} of {pair[0]} is other in a helper: "
            f"a file of the model, an add-on or the data was changed meanwhile; {GO_ON}"
        )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
