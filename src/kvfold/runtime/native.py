"""Our own C++, compiled on the user's machine when it is first needed.

A plain shared library with a C interface: it needs a C++ compiler but neither Python's nor
torch's headers, so it compiles in seconds. It is kept in kvfold's cache folder, by the source,
the flags and the processor that it was compiled for. Where it can't be had, the caller has a
plain path; why, and what to do, is said once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from kvfold.models import CACHE_VARIABLE, cache_folder

NATIVE_VARIABLE = "KVFOLD_NATIVE"
"""Set to 0, nothing is compiled or loaded, and the plain paths run."""
COMPILER_VARIABLE = "CXX"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-w")
VARIANTS = (("-march=native", "-fopenmp"), ("-march=native",), ())
"""Tried in turn. Without OpenMP one thread does the work."""
SECONDS = 300
"""After so long a compiler is taken to hang."""


@functools.cache
def native_library(source: Path) -> ctypes.CDLL | None:
    """The library compiled from `source`, or None, with the reason said, where there is none.

    The first call on a machine compiles, for some seconds; several processes wait for one.
    """
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return None
    compiler = find_compiler()
    if compiler is None:
        say_plain(
            f"no C++ compiler was found: install g++ or clang++, or name one in {COMPILER_VARIABLE}"
        )
        return None
    library = cache_folder() / "native" / f"{source.stem}-{_key(source, compiler)}.so"
    try:
        if not library.is_file():
            library.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(library.with_suffix(".lock")):
                if not library.is_file():
                    _compile(source, compiler, library)
        return ctypes.CDLL(str(library))
    except _CompilerError as error:
        say_plain(f"{compiler} did not compile {source.name}: {error}")
    except OSError as error:
        say_plain(f"{library} can't be written or loaded: {error}; set {CACHE_VARIABLE}")
    return None


def find_compiler() -> str | None:
    """The C++ compiler: the one that $CXX names, else the first of `COMPILERS` on the path."""
    named = os.environ.get(COMPILER_VARIABLE)
    return next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)


def say_plain(reason: str) -> None:
    """Tell the user that the plain path runs."""
    _say(f"Quantised slots are read by the plain path, which is several times slower: {reason}")


class _CompilerError(Exception):
    """What the compiler said, in short."""


def _compile(source: Path, compiler: str, library: Path) -> None:
    """Compile to a temporary file beside the library, then rename it into place."""
    started = time.monotonic()
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        for variant in VARIANTS:
            command = [compiler, *FLAGS, *variant, str(source), "-o", temporary]
            failure = _failure(command, temporary)
            if failure is None:
                break
        else:
            raise _CompilerError(failure)
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)
    seconds = time.monotonic() - started
    threads = "" if "-fopenmp" in variant else ", for one thread: this compiler has no OpenMP"
    _say(f"Compiled {source.name} in {seconds:.1f} s, once for this machine{threads}")


def _failure(command: list[str], made: str) -> str | None:
    """Why the command made no library that loads, or None if it did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        if done.returncode:
            said = " ".join(done.stderr.split())
            return said[:300] or f"it ended with status {done.returncode}"
        ctypes.CDLL(made)  # its OpenMP runtime may be missing
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def _key(source: Path, compiler: str) -> str:
    """Names what the machine code depends on; a home folder may serve several processors."""
    parts = (source.read_text(encoding="utf-8"), repr((FLAGS, VARIANTS)), compiler, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    described = [platform.system(), platform.machine(), platform.processor()]
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        lines = listing.read_text(encoding="utf-8", errors="replace").splitlines()
        names = ("vendor_id", "cpu family", "model", "flags", "Features")
        described += sorted({line for line in lines if line.split("\t")[0].strip() in names})
    return "\n".join(described)


def _say(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
