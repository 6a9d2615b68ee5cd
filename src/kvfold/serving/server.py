"""Running the application on a socket until it is told to stop."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from kvfold.serving.gates import JsonLines

DRAIN_MARGIN_SECONDS = 5


def log_as_json_lines() -> None:
    """Let everything that is logged come out on stderr, one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class Server(uvicorn.Server):
    """uvicorn's, which calls `ready` with its address once it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        if self.started:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            self.ready(f"http://{host}:{self.port}")

    @property
    def port(self) -> int:
        """The one that it listens on, chosen by the system for port 0."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


def make_server(
    app: FastAPI,
    host: str,
    port: int,
    drain_seconds: float,
    ready: Callable[[str], None] = lambda address: None,
) -> Server:
    """A server that lets requests finish for so long once it is told to stop."""
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
    return Server(config, ready)
