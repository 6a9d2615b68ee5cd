"""The environment that peers run in: made once, kept in the user's cache folder.

kvpress pins another transformers than kvfold needs, so it gets a virtual environment of its own,
with the torch that kvfold itself runs on. pip is the user's own, with all of its settings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from filelock import FileLock

from kvfold.errors import PeerError
from kvfold.models import cache_folder

PINNED = {"kvpress": "0.5.5", "optimum-quanto": "0.2.7"}
ASKED = ("torch", "transformers", *PINNED)
_TELL_VERSIONS = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
LINES = 12
"""Of what pip said, in an error."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class PeerEnvironment:
    """A Python with what peers need. versions: of the packages that answers depend on."""

    python: Path
    versions: Mapping[str, str]

    @classmethod
    def of(cls, python: Path) -> PeerEnvironment:
        """What that interpreter has; raises `PeerError` if it can't be asked."""
        try:
            done = subprocess.run(
                [python, "-I", "-c", _TELL_VERSIONS, *ASKED],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            return cls(python, json.loads(done.stdout))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise PeerError(
                f"the peers' environment must have a Python that runs; {python} can't be asked "
                f"what it has ({error}); name another folder with --peers-env, or delete it"
            ) from error


def default_folder() -> Path:
    """Where the environment is kept: its name says what is in it."""
    name = "-".join(f"{package}-{version}" for package, version in PINNED.items())
    return cache_folder() / f"peers-{name}-torch-{_torch()}"


def peer_environment(folder: Path | None, say: Say) -> PeerEnvironment:
    """The environment in a folder, made or completed there first if need be.

    folder: None for `default_folder()`. say: is told what is done, and what pip says. Raises
    `PeerError` for a folder with something else in it, or where the packages can't be installed.
    """
    place = (default_folder() if folder is None else folder.expanduser()).absolute()
    with _held(place):
        python = _python(place)
        if not python.exists():
            say(f"Making an environment for peers in {place}, once")
            _run([sys.executable, "-m", "venv", str(place)], "a virtual environment", say)
        found = PeerEnvironment.of(python)
        missing = [f"{n}=={v}" for n, v in PINNED.items() if found.versions.get(n) != v]
        if missing:
            wanted = [f"torch=={_torch()}", *missing]
            say(f"Installing {', '.join(wanted)} into it: some hundreds of megabytes")
            pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *wanted]
            _run(pip, " and ".join(wanted), say)
            found = PeerEnvironment.of(python)
        return found


@contextmanager
def _held(place: Path) -> Iterator[None]:
    """Keep the environment's folder from other processes; raises `PeerError` if it can't be one."""
    try:
        if place.exists() and not (place / "pyvenv.cfg").is_file() and any(place.iterdir()):
            raise PeerError(
                f"the peers' environment must be in a folder of its own; {place} has other files "
                "in it; name a new folder with --peers-env"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place.with_name(f"{place.name}.lock"))
        lock.acquire()
    except OSError as error:
        raise PeerError(
            f"the peers' environment must be in a folder that can be made and read; {place}: "
            f"{error.strerror or error}; name a new folder with --peers-env"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _torch() -> str:
    """The version of torch here, without its build."""
    return metadata.version("torch").partition("+")[0]


def _python(place: Path) -> Path:
    return place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _run(command: list[str], what: str, say: Say) -> None:
    """Run it, each line of what it says told to `say`; raises `PeerError` if it fails."""
    lines: list[str] = []
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip():
                    lines.append(line.strip())
                    say(line.strip())
    except OSError as error:
        raise PeerError(f"{command[0]} can't be run: {error.strerror or error}") from error
    if process.returncode != 0:
        told = "\n".join(lines[-LINES:])
        raise PeerError(
            f"peers need {what}, which could not be made ready (status {process.returncode}):\n"
            f"{told}\nGive the same command again once that is mended, or leave --peers out"
        )
