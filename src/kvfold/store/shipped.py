"""Add-ons that come with the package, for the embedded default and the tiny hybrid.

Each is a folder as `AddOn.save_pretrained` writes it, made by the recipe of its name in
`training/recipes`, and is named wherever a folder of an add-on can be.
"""

from __future__ import annotations

from pathlib import Path

SHIPPED_FOLDER = Path(__file__).parent.parent / "addons"


def shipped() -> tuple[str, ...]:
    """The names of all add-ons that come with the package, in order."""
    if not SHIPPED_FOLDER.is_dir():
        return ()
    return tuple(sorted(folder.name for folder in SHIPPED_FOLDER.iterdir() if folder.is_dir()))


def shipped_folder(name: str) -> Path | None:
    """The folder of an add-on that comes with the package; None if none has the name."""
    return SHIPPED_FOLDER / name if name in shipped() else None
