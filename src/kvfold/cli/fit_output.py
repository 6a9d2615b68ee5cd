"""Where `kvfold fit` writes to: what may be replaced, and what is left over."""

from __future__ import annotations

import shutil
from pathlib import Path

import typer


def check_output(output: Path, *, force: bool) -> None:
    """Refuse before the fit what could not be written after it."""
    if not output.exists():
        return
    if not output.is_dir():
        raise typer.BadParameter(f"{output} is a file; an add-on is a folder")
    if any(output.iterdir()):
        if not force:
            raise typer.BadParameter(f"{output} exists; choose another folder or add --force")
        if not (output / "addon.json").exists():
            raise typer.BadParameter(f"{output} holds something else than an add-on")


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
