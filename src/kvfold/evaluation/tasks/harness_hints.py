"""lm-eval warns of settings that are meant as they are here; users need not read that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_hints(logger: str) -> Iterator[None]:
    """Let a logger of the harness tell of errors only."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
