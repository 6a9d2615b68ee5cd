"""The other end of `worker.py`: starts it, asks it, and says why it died if it did."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kvfold.errors import PeerError

WORKER = Path(__file__).with_name("worker.py")
TIMEOUT_SECONDS = 3600.0
"""For one answer, loading included: a busy machine takes long over a long prompt."""

STDERR_CHARACTERS = 2000
FLOAT_BYTES = 4
GO_ON = "give the same command again, and the run goes on where it stopped"


class WorkerProcess:
    """A worker that is running. Use `running`, which starts and ends it."""

    def __init__(
        self, name: str, command: Sequence[str], errors: BinaryIO, timeout_seconds: float
    ) -> None:
        self.name, self.errors, self.timeout_seconds = name, errors, timeout_seconds
        self.timed_out = False
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        except OSError as error:
            raise PeerError(
                f"the worker of {name} can't be started: {command[0]}: {error.strerror or error}"
            ) from error

    def hello(self) -> dict[str, Any]:
        """What it says once its model is loaded."""
        return self._answer()[0]

    def ask(self, op: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """One request's answer: plain data, and float32 tensors on the CPU by name.

        Raises `PeerError` if the worker can't do it, has died, or takes too long.
        """
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except OSError:
            raise self._died() from None
        return self._answer()

    def end(self) -> None:
        """Let it end, or make it."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        watch = threading.Timer(self.timeout_seconds, self._take_too_long)
        watch.daemon = True
        watch.start()
        try:
            data = self._line()
            if "error" in data:
                raise PeerError(
                    f"{self.name} can't answer: {data['error']}; its worker said:\n{self._said()}"
                )
            return data, {name: self._tensor(shape) for name, shape in data.pop("tensors")}
        finally:
            watch.cancel()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._died()
        try:
            data = json.loads(line)
        except ValueError:
            data = None
        if not isinstance(data, dict) or not ({"error", "tensors"} & data.keys()):
            raise PeerError(
                f"the worker of {self.name} must answer in JSON lines; it sent {line[:80]!r}; its "
                f"worker said:\n{self._said()}"
            )
        return data

    def _tensor(self, shape: Sequence[int]) -> Tensor:
        assert self.process.stdout is not None
        size = FLOAT_BYTES * math.prod(shape)
        held = self.process.stdout.read(size)
        if len(held) < size:
            raise self._died()
        return torch.frombuffer(bytearray(held), dtype=torch.float32).view(tuple(shape))

    def _take_too_long(self) -> None:
        self.timed_out = True
        self.process.kill()

    def _died(self) -> PeerError:
        status = self.process.wait()
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        if self.timed_out:
            how = f"gave no answer within {self.timeout_seconds:,.0f} seconds, and was ended"
        return PeerError(f"the worker of {self.name} {how}; {GO_ON}. It said last:\n{self._said()}")

    def _said(self) -> str:
        """The end of what it wrote to its standard error, without progress bars."""
        self.errors.flush()
        end = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, end - 8 * STDERR_CHARACTERS))
        text = self.errors.read().decode(errors="replace")
        lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.splitlines()]
        return "\n".join(line for line in lines if line)[-STDERR_CHARACTERS:] or "(nothing)"


@contextmanager
def running(
    name: str,
    python: Path,
    arguments: Sequence[str],
    *,
    script: Path = WORKER,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Iterator[WorkerProcess]:
    """A worker that has loaded its model; it ends with the context.

    name: of the peer, for messages. arguments: of `worker.py`. Raises `PeerError` if it can't be
    started or the model can't be loaded.
    """
    # Isolated: neither this process' paths nor the folder of the script are searched for modules.
    command = [str(python), "-I", str(script), *arguments]
    with tempfile.TemporaryFile() as errors:
        worker = WorkerProcess(name, command, errors, timeout_seconds)
        try:
            worker.hello()
            yield worker
        finally:
            worker.end()
