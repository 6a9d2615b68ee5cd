"""Running the application on a socket until it is told to stop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvfold.serving.gates import JsonLines

DRAIN_MARGIN_SECONDS = 5


def log_as_json_lines() -> None:
    """Let everything that is logged come out on stderr, one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def make_server(app: FastAPI, host: str, port: int, drain_seconds: float) -> uvicorn.Server:
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
    return uvicorn.Server(config)


def run_server(server: uvicorn.Server, ready: Callable[[str], None]) -> bool:
    """Run it until it is told to stop; returns whether it could begin.

    ready: called with the server's address, once its port is known.
    """
    host = server.config.host
    shown = f"[{host}]" if ":" in host else host
    with closing(server.config.bind_socket()) as bound:
        ready(f"http://{shown}:{bound.getsockname()[1]}")
        server.run(sockets=[bound])
    return server.started


def bound_port(server: Any) -> int:
    """The port that a started server listens on, chosen by the system for port 0."""
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port
