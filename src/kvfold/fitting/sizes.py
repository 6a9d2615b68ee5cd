"""Amounts of memory, as people write and read them."""

from __future__ import annotations

import re

from kvfold.errors import RecipeError

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_bytes(text: str | int) -> int:
    """Bytes from a number or from text such as `24GiB`; raises `RecipeError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in UNITS:
        raise RecipeError(
            f"memory is a number of bytes, or one with a unit such as 24GiB or 16GB; got {text!r}"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def shown_bytes(size: float) -> str:
    """Bytes for people: GiB, or MiB below one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
