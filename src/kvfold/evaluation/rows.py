"""The rows of a published table, kept in a file as they are measured.

A row that is in the file already is not measured again, so an interrupted run goes on where it
was; a file of other settings is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfold.errors import ReportError
from kvfold.evaluation.environment import environment
from kvfold.evaluation.report import write_json


class Rows:
    """Measured rows by name, and the JSON file that holds them.

    settings: plain data that every row was measured with. shared: figures that belong to no row,
    written beside them (`base`, for one). Raises `ReportError` for a file of other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.settings = settings
        self.shared: dict[str, Any] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        data = json.loads(self.path.read_text(encoding="utf-8"))
        if data["settings"] != self.settings:
            raise ReportError(
                f"{self.path} was measured with {data['settings']}, and this run has "
                f"{self.settings}; name another --out, or delete the file"
            )
        self.shared = data["shared"]
        self.rows = {row["name"]: row for row in data["rows"]}

    def __contains__(self, name: str) -> bool:
        """Whether a row of that name has been measured."""
        return name in self.rows

    def add(self, row: dict[str, Any], order: Sequence[str]) -> None:
        """Take in a row, put it in its place in the table's order, and write all rows."""
        self.rows[row["name"]] = row
        places = {name: place for place, name in enumerate(order)}
        self.rows = dict(sorted(self.rows.items(), key=lambda item: places.get(item[0], -1)))
        self.save()

    def save(self) -> None:
        """Write all rows so far, with the machine and versions of this run."""
        data = {**environment(), "settings": self.settings, "shared": self.shared}
        write_json(self.path, {**data, "rows": list(self.rows.values())})
