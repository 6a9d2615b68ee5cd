"""The lines of a training's log, drawn as curves by a program made for that.

A tracker takes the same lines as the JSON-lines log (`kvfold.fitting.json_lines`) and hands on
every number in them: a step's as `NUMBER-STAGE/KEY` at that step, an event's as `EVENT/KEY` at how
many of its kind there have been. Both programs are optional, and imported here alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from kvfold.errors import FitError, MissingExtraError
from kvfold.fitting.json_lines import Log

TrackerName = Literal["tensorboard", "trackio"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)

PROJECT = "kvfold"
"""What runs are filed under in trackio."""

Scalars = Callable[[Mapping[str, float], int], None]
"""Takes numbers by name, and the step they are of."""


@contextmanager
def tracking(name: TrackerName | None, run: str, folder: Path) -> Iterator[Log]:
    """A consumer of log lines inside the block; it does nothing for no name.

    run: what the run is called. folder: where tensorboard's files go; trackio has a place of its
    own, and goes on with a run of the same name. Raises `MissingExtraError` where the program is
    not installed, `FitError` for another name.
    """
    if name is None:
        yield lambda _: None
    elif name == "tensorboard":
        with _tensorboard(folder) as scalars:
            yield _taker(scalars)
    elif name == "trackio":
        with _trackio(run) as scalars:
            yield _taker(scalars)
    else:
        raise FitError(f"a tracker must be one of {', '.join(TRACKERS)}; got {name!r}")


def _taker(scalars: Scalars) -> Log:
    events: Counter[str] = Counter()

    def take(line: dict[str, Any]) -> None:
        numbers = {
            key: float(value)
            for key, value in line.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        number, step = numbers.pop("number", None), numbers.pop("step", None)
        kind = str(line.get("event", line.get("stage", "log")))
        prefix = kind if number is None else f"{int(number)}-{kind}"
        if step is None:
            events[prefix] += 1
            step = events[prefix]
        if numbers:
            scalars({f"{prefix}/{key}": value for key, value in numbers.items()}, int(step))

    return take


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Scalars]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _missing("tensorboard") from error
    writer: Any = SummaryWriter(str(folder))

    def scalars(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    try:
        yield scalars
    finally:
        writer.close()


@contextmanager
def _trackio(run: str) -> Iterator[Scalars]:
    try:
        import trackio
    except ImportError as error:
        raise _missing("trackio") from error
    trackio.init(project=PROJECT, name=run, resume="allow", embed=False)
    try:
        yield lambda numbers, step: trackio.log(dict(numbers), step=step)
    finally:
        trackio.finish()


def _missing(name: str) -> MissingExtraError:
    return MissingExtraError(
        f"tracking with {name} needs it to be installed; install the extra with pip install "
        f"'kvfold[{name}]', or leave --track out"
    )
