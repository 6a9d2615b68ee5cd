"""Running the application on a socket until it is told to stop, gently or at once."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvfold.errors import AddressError
from kvfold.serving.engine import HALT_SECONDS, Engine
from kvfold.serving.gates import JsonLines

LOOK_SECONDS = 0.1
"""How often to look whether the end is to come at once."""
TELL_SECONDS = 2.0
"""How long clients have to take their last answer when the end comes before they have theirs."""
DRAIN_MARGIN_SECONDS = int(HALT_SECONDS + TELL_SECONDS) + 3
"""After which uvicorn would cancel what still runs."""


def log_as_json_lines() -> None:
    """Let everything that is logged come out on stderr, one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets at every address of a host, bound but not listening yet: a port that is free.

    port: 0 lets the system choose one. Raises `AddressError`, having closed them all.
    """
    made: list[socket.socket] = []
    refusal: Exception | None = None
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in dict.fromkeys(found):
            chosen = made[0].getsockname()[1] if made else port
            try:
                made.append(_bound(socket.socket(family, kind, protocol), address, chosen))
            except OSError as error:
                # A name may have an address of a kind that this machine has not; others may do.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                refusal = error
    except (OSError, UnicodeError) as error:
        refusal, made = error, _closed(made)
    if not made:
        assert refusal is not None
        raise _not_listening(host, port, refusal) from refusal
    return made


def _bound(made: socket.socket, address: Any, port: int) -> socket.socket:
    try:
        if sys.platform != "win32":  # there it would share the port with whoever has it
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address[0], port, *address[2:]))
    except OSError:
        made.close()
        raise
    return made


def _closed(sockets: list[socket.socket]) -> list[socket.socket]:
    for one in sockets:
        one.close()
    return []


def _not_listening(host: str, port: int, error: Exception) -> AddressError:
    reason = getattr(error, "strerror", None) or str(error)
    return AddressError(
        f"a server needs an address and a port that are free; {host or 'any address'}, port "
        f"{port}, can't be had ({reason}); choose others with --host and --port, or end what "
        "listens there"
    )


def is_everywhere(host: str) -> bool:
    """Whether the address stands for all that this machine has."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def page_address(host: str, port: int) -> str:
    """The URL by which a browser on this machine finds the server."""
    if is_everywhere(host):
        host = "[::1]" if ":" in host else "127.0.0.1"
    elif ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's, which calls `ready` with its address once it listens.

    Told to stop, it lets answers finish for `drain_seconds`; told so twice, by Ctrl-C, it does not.
    Then the engine is halted, so that who still waits is told that nothing will come, and every
    connection is closed. A signal that was heeded is not raised again afterwards, as uvicorn
    would: lanes are still to be closed then.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: Engine,
        drain_seconds: float,
        ready: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self.engine = engine
        self.drain_seconds = drain_seconds
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`. Raises `AddressError` if someone has taken the port meanwhile."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _not_listening(self.config.host, self.config.port, error) from error
        if self.started:
            self.ready(page_address(self.config.host, self.port))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `uvicorn.Server`."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.drain_seconds
        ending = loop.create_task(super().shutdown(sockets))
        while not ending.done() and not self.force_exit and loop.time() < until:
            await asyncio.wait([ending], timeout=LOOK_SECONDS)
        if self.force_exit or not ending.done():
            await self._cut_off()
        await ending
        if self.force_exit and not self.engine.is_running:
            await self.lifespan.shutdown()  # which uvicorn leaves out

    async def _cut_off(self) -> None:
        """Halt the engine, which tells all who wait; then close what is still open."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, partial(self.engine.close, drain_seconds=0))
        until = loop.time() + TELL_SECONDS
        while self.server_state.connections and loop.time() < until:
            await asyncio.sleep(LOOK_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @property
    def port(self) -> int:
        """The one that it listens on, chosen by the system for port 0."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


def make_server(
    app: FastAPI,
    engine: Engine,
    host: str,
    port: int,
    drain_seconds: float,
    ready: Callable[[str], None] = lambda address: None,
) -> Server:
    """A server that lets requests finish for so long once it is told to stop.

    engine: the application's. host, port: where it listens; with sockets given to `run`, where
    those are bound.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=int(drain_seconds) + DRAIN_MARGIN_SECONDS,
    )
    return Server(config, engine, drain_seconds, ready)
