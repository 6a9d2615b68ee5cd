"""Where a figure comes from: machine, versions, commit and command.

A published number without these can't be made again. Everything here is best effort and quick;
what can't be found is None, never guessed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kvfold import __version__

PACKAGES = ("torch", "transformers", "numpy", "safetensors")


def _program() -> str:
    """The script that runs; `kvfold` where it was started as a module."""
    path = Path(sys.argv[0])
    return path.parent.name if path.name == "__main__.py" else path.name


def environment() -> dict[str, Any]:
    """Machine, library versions, commit and the command that is running, as plain data."""
    return {
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "system": platform.system(),
        },
        "versions": {"python": platform.python_version(), "kvfold": __version__, **_versions()},
    }


def code_state() -> dict[str, str | None]:
    """Which code of kvfold runs: its commit, None for an installed wheel, and its sources' digest.

    The digest tells states apart that have one commit, or none.
    """
    found = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\n".encode())
        found.update(path.read_bytes())
    return {"commit": _commit(), "sources": found.hexdigest()}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _commit() -> str | None:
    """The commit of the source tree that this package runs from; None for an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    root = package.parents[1]
    if root / "src" / package.name != package:
        return None
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src")
    return f"{head} with uncommitted changes" if changed else head


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
