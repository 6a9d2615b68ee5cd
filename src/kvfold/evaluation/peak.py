"""How much memory a piece of work takes at its highest, above what was in use before it.

On a GPU the allocator knows. On Linux the kernel keeps the highest resident size of a process, and
can be told to forget it; elsewhere there is no figure.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
FORGET_HIGHEST = Path("/proc/self/clear_refs")


class Peak:
    """The highest use of memory within a `peak_memory` block, in bytes; None if not known."""

    above_start: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Watch the memory of a device, or of this process on a CPU, until the block ends."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.above_start = torch.cuda.max_memory_allocated(device) - before
        return
    known = _forget_highest()
    start = _status("VmRSS") if known else None
    yield peak
    highest = _status("VmHWM") if known else None
    if start is not None and highest is not None:
        peak.above_start = max(0, highest - start)


def _forget_highest() -> bool:
    """Give freed memory back, so that using it again shows, and start the high-water mark anew."""
    if not sys.platform.startswith("linux"):
        return False
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        FORGET_HIGHEST.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _status(name: str) -> int | None:
    """A size from the kernel's account of this process, in bytes."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
