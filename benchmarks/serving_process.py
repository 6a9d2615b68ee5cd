"""A real `kvfold serve` (or vLLM's) in a process of its own, as the benchmarks of serving watch it.

What it tells is read from outside only: its answers, /metrics, its log, and the system's count of
its memory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from kvfold.cli.serve import DEMO_ADDON, DEMO_MODEL

START_SECONDS = 900
"""Long: on a busy machine vLLM takes minutes to be imported by its three processes."""
STOP_SECONDS = 90
MEMORY_GIVEN_BACK = {
    "MALLOC_MMAP_THRESHOLD_": str(2**17),
    "MALLOC_TRIM_THRESHOLD_": str(2**17),
    "MALLOC_ARENA_MAX": "2",
}
"""For an allocator that gives freed memory back, or resident memory would tell of it, not of us."""


GAUGES = MappingProxyType(
    {
        "cache_bytes": "kvfold_cache_bytes",
        "rows": "kvfold_rows",
        "waiting": "kvfold_waiting_requests",
    }
)
VLLM_GAUGES = MappingProxyType(
    {
        "pool_used": "vllm:kv_cache_usage_perc",
        "rows": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
    }
)
"""Names at /metrics of what is watched; `pool_used` is a part of the pool, from 0 to 1."""


@dataclass(frozen=True)
class Kind:
    """A model to serve. arguments: of `kvfold serve`. folded, plain: its names there.

    longest: words of a prompt here.
    """

    arguments: tuple[str, ...]
    folded: str
    plain: str
    longest: int


KINDS = {
    DEMO_MODEL: Kind(("--demo",), DEMO_ADDON, DEMO_MODEL, 1500),
    "tiny-hybrid": Kind(
        ("tiny-hybrid", "--addon", "tiny-hybrid-card"), "tiny-hybrid-card", "tiny-hybrid", 1500
    ),
}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port


@dataclass
class Server:
    """One server on a port of this machine. arguments: of the command. log: what it writes.

    command: of `module`. gauges: names of what is watched. up: whether it takes requests. kills:
    how often it was killed.
    """

    arguments: Sequence[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    command: Sequence[str] = ("serve",)
    module: str = "kvfold"
    gauges: Mapping[str, str] = field(default_factory=lambda: GAUGES)
    port: int = field(default_factory=free_port)
    up: bool = False
    kills: int = 0
    running: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Server:
        """Start it and wait until it takes requests; its log goes on where it was."""
        command = [sys.executable, "-m", self.module, *self.command, *self.arguments]
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                [*command, "--port", str(self.port)],
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            if self.running.poll() is not None or time.monotonic() > deadline:
                self.running.kill()
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-8000:]}")
            time.sleep(0.1)
        self.up = True
        return self

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Let it finish what it does, and end."""
        assert self.running is not None
        self.up = False
        self.running.terminate()
        try:
            self.running.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        assert self.running is not None
        self.up = False
        self.kills += 1
        self.running.kill()
        self.running.wait()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def resident_bytes(self) -> int:
        """Resident memory of its processes now; 0 while it is down."""
        return sum(self.resident_by_process().values())

    def resident_by_process(self) -> dict[str, int]:
        """Resident bytes of each of its processes, by number and name; none while it is down."""
        try:
            return {
                f"{one.pid} {one.name()}": int(one.memory_info().rss) for one in self._processes()
            }
        except psutil.Error:
            return {}

    def resident_by_mapping(self) -> dict[str, int]:
        """Resident bytes of each of its memory mappings, by process and addresses (of Linux)."""
        try:
            return {
                f"{one.pid} {mapping.addr}": int(mapping.rss)
                for one in self._processes()
                for mapping in one.memory_maps(grouped=False)
            }
        except psutil.Error:
            return {}

    def _processes(self) -> list[psutil.Process]:
        """The server's own and those that it started; raises `psutil.Error` while it is down."""
        assert self.running is not None
        first = psutil.Process(self.running.pid)
        return [first, *first.children(recursive=True)]

    def figures(self) -> dict[str, float]:
        """/metrics, summed over all labels."""
        found: dict[str, float] = {}
        for line in httpx.get(self.url + "/metrics", timeout=60).text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                bare = name.split("{", 1)[0]
                found[bare] = found.get(bare, 0.0) + float(value)
        return found

    def watched(self) -> dict[str, float]:
        """Its gauges now, by the names that they have here."""
        now = self.figures()
        return {name: now[told] for name, told in self.gauges.items()}

    def wait_until_idle(self, seconds: float) -> float | None:
        """Seconds until nothing waits or runs; None if that takes too long."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            now = self.watched()
            if now["rows"] == 0 and now["waiting"] == 0:
                return time.monotonic() - began
            time.sleep(0.25)
        return None

    def log_lines(self) -> Iterator[dict[str, Any]]:
        """What it logged as JSON, with `at` in seconds since 1970."""
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                try:
                    made = json.loads(line)
                except ValueError:  # cut off by a kill
                    continue
                made["at"] = datetime.fromisoformat(made["time"]).timestamp()
                yield made


def words(seed: str, count: int) -> str:
    """So many words of the tiny hybrid's language: plain English sentences, the same each time."""
    from kvfold.evaluation.tiny_language import training_document

    return " ".join(training_document(seed, count)[0][:count])
