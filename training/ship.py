"""Put add-ons that recipes have made into the package, with half-precision weights.

    python training/ship.py ADDON [ADDON ...]

Each folder comes to stand in `src/kvfold/addons` under its own name, with its model card.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from kvfold.store.addon import AddOn
from kvfold.store.shipped import SHIPPED_FOLDER


def ship(folder: Path) -> Path:
    """Copy one add-on into the package; returns where it is."""
    addon = AddOn.from_pretrained(folder, dtype=torch.float16)
    target = SHIPPED_FOLDER / folder.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    addon.save_pretrained(target)
    return target


def main() -> None:
    """Ship every folder that is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("addons", nargs="+", type=Path)
    for folder in parser.parse_args().addons:
        target = ship(folder)
        size = sum(file.stat().st_size for file in target.iterdir()) / 1e6
        print(f"{target}: {size:.1f} MB")


if __name__ == "__main__":
    main()
