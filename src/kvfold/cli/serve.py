"""`kvfold serve`: an OpenAI-compatible server for a model, plain and under add-ons."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from kvfold.cli.options import (
    DeviceOption,
    DtypeOption,
    ResidentOption,
    load_addons,
    load_model,
    say_plans,
)
from kvfold.errors import MissingExtraError

if TYPE_CHECKING:
    from kvfold.serving.engine import Engine
    from kvfold.serving.lane import Lane
    from kvfold.serving.loading import StoreOf

HELP = (
    "Serve a model to many clients at once, by OpenAI's API.\n\n"
    "The plain model answers by the name given here, and each add-on's folded one by the "
    "add-on's name, on one set of weights. GET /v1/models lists them, and the page at / puts the "
    "same question to both, with the bytes that their caches take.\n\n"
    "Example: kvfold serve --demo"
)
DEMO_MODEL = "smollm2-135m"
DEMO_ADDON = "smollm2-csa2"
DEMO_RESIDENT = "shared"
"""So that the demo's cache is smaller in memory too, which `auto` gives up here for speed."""
INTERRUPTED = 130
"""The exit code of what Ctrl-C has cut short."""

log = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("serve", help=HELP)(serve_command)


def serve_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{DEMO_MODEL} (embedded, the default), tiny-hybrid, a folder or a hub id.",
        ),
    ] = None,
    addon: Annotated[
        list[str] | None,
        typer.Option(
            "--addon",
            metavar="DIR",
            help="Add-on folder, one that comes with kvfold, or hub id; may be repeated.",
        ),
    ] = None,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            help=f"Serve {DEMO_MODEL} with the add-on {DEMO_ADDON}, --resident {DEMO_RESIDENT}.",
        ),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain/--no-plain", help="Serve the model without add-ons as well.")
    ] = True,
    host: Annotated[
        str, typer.Option(help="Address to listen on; by default this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 lets the system choose.")] = 8000,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Answers of one model that are generated at once.")
    ] = 16,
    queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; more get status 429.")
    ] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 4096,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="The most tokens of prompt and answer; the model's own if not."),
    ] = None,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, help="Prompt tokens read between two steps of running answers.")
    ] = 128,
    max_body: Annotated[int, typer.Option(min=1024, help="The largest body, in bytes.")] = 4
    * 2**20,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keys, one a line; requests must bring one of them."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Origin whose pages may ask; may be repeated."),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long answers may take to finish at the end.")
    ] = 30.0,
    store: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder or fsspec URL to keep prompts' folded caches in."),
    ] = None,
    store_bytes: Annotated[
        int, typer.Option(min=1, help="What the store may take; what was used longest ago goes.")
    ] = 4 * 2**30,
    store_plain: Annotated[
        bool,
        typer.Option(
            "--store-plain/--no-store-plain",
            help="Keep the plain model's caches too, which are several times larger.",
        ),
    ] = False,
    resident: ResidentOption = None,
    warm_up: Annotated[
        bool, typer.Option("--warm-up/--no-warm-up", help="Run a few tokens before listening.")
    ] = True,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Load, warm up, and serve until told to stop; see HELP."""
    if demo and (model or addon):
        raise typer.BadParameter("--demo names model and add-on itself; leave them out")
    name = DEMO_MODEL if demo or model is None else model
    require_extra()
    from kvfold.serving.app import ServerSettings
    from kvfold.serving.asking import Limits
    from kvfold.serving.lane import LaneSettings
    from kvfold.serving.server import bound_sockets

    keys = read_keys(api_key_file)
    settings = ServerSettings(
        keys=keys,
        cors=tuple(cors_origin or ()),
        body_bytes=max_body,
        drain_seconds=drain_seconds,
        limits=Limits(max_tokens=max_tokens),
    )
    screen = Console(stderr=True)
    with ExitStack() as held:
        # Before the model is loaded, which may take minutes: what can fail at once does so.
        sockets = [held.enter_context(one) for one in bound_sockets(host, port)]
        store_of = None if store is None else stores_in(store, store_bytes)
        lanes = load_lanes(
            screen,
            name,
            [DEMO_ADDON] if demo else addon or [],
            LaneSettings(max_rows=max_batch, chunk=prefill_chunk, context=context),
            plain=plain,
            warm_up=warm_up,
            resident=resident or (DEMO_RESIDENT if demo else None),
            dtype=dtype,
            device=device,
            store_of=store_of,
            store_plain=store_plain,
        )
        if not keys and not is_loopback(host):
            screen.print(
                f"Listening on {host} without a key: whoever reaches this machine can use it. "
                "--api-key-file asks for one.",
                style="yellow",
            )
        _serve(screen, lanes, queue, settings, host, port, sockets)


def require_extra() -> None:
    """Raise `MissingExtraError` where a package that only serving needs is not installed."""
    from importlib.util import find_spec

    needed = ("fastapi", "jinja2", "prometheus_client", "uvicorn")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"serving needs {' and '.join(missing)}; install the extra with pip install "
            "'kvfold[serve]'"
        )


def stores_in(where: str, max_bytes: int) -> StoreOf:
    """Makes stores over one folder or URL that can be written to.

    Raises `SnapshotError` or `MissingExtraError`.
    """
    from kvfold.serving.stored import StoredPrefixes
    from kvfold.store.prefix_store import PrefixStore

    store = PrefixStore(where, max_bytes=max_bytes)
    store.place.check_writable()
    return partial(StoredPrefixes, store)


def read_keys(path: Path | None) -> tuple[str, ...]:
    """Keys from a file, one a line; raises `typer.BadParameter` for a file without any."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"can't read the keys in {path}: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise typer.BadParameter(f"{path} must hold a key in at least one line; it is empty")
    return keys


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_lanes(
    screen: Console,
    name: str,
    addons: list[str],
    settings: Any,
    *,
    plain: bool,
    warm_up: bool,
    resident: str | None,
    dtype: str | None,
    device: str | None,
    store_of: StoreOf | None,
    store_plain: bool = False,
) -> dict[str, Lane]:
    """The model and its add-ons, loaded with progress and warmed up."""
    from kvfold.evaluation.candidates import with_plan
    from kvfold.serving.loading import make_lanes

    started = time.perf_counter()
    with screen.status(f"loading {name}") as status:
        loaded, tokenizer = load_model(name, dtype, device)
        status.update(f"loading {len(addons)} add-ons")
        found = {
            addon: with_plan(own, resident=resident)
            for addon, own in load_addons(addons, loaded).items()
        }
        lanes = make_lanes(
            loaded,
            tokenizer,
            found,
            plain=name if plain else None,
            settings=settings,
            store_of=store_of,
            store_plain=store_plain,
        )
        for lane in lanes.values() if warm_up else ():
            status.update(f"warming up {lane.name}")
            lane.warm_up()
    say_plans(screen, loaded, found)
    for lane in lanes.values():
        if not lane.together:
            screen.print(f"{lane.name}: rows of this model can't share a cache; each runs alone")
        if lane.store is not None and not lane.reads_in_chunks:
            screen.print(f"{lane.name}: its plan reads prompts in one piece; none are kept")
    seconds = time.perf_counter() - started
    screen.print(f"Ready after {seconds:.1f} s: {', '.join(lanes)}", highlight=False)
    return lanes


def _serve(
    screen: Console,
    lanes: dict[str, Lane],
    queue: int,
    settings: Any,
    host: str,
    port: int,
    sockets: list[socket.socket],
) -> None:
    from kvfold.serving.app import create_app
    from kvfold.serving.engine import Engine
    from kvfold.serving.metrics import Metrics
    from kvfold.serving.server import is_everywhere, log_as_json_lines, make_server

    metrics = Metrics()
    engine = Engine(lanes, queue=queue, listener=metrics)
    log_as_json_lines()

    def say(address: str) -> None:
        if is_everywhere(host):
            kind = "" if not host else "IPv6 " if ":" in host else "IPv4 "
            screen.print(f"Listening on all {kind}addresses of this machine", highlight=False)
        screen.print(f"A page to try it: {address}/", highlight=False)
        screen.print(
            f"OpenAI's API: {address}/v1  (Ctrl-C ends it; twice, at once)", highlight=False
        )

    app = create_app(engine, settings, metrics)
    server = make_server(app, engine, host, port, settings.drain_seconds, say)
    try:
        try:
            server.run(sockets)
        finally:
            _close(engine, lanes)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    if server.force_exit:
        raise typer.Exit(INTERRUPTED)
    if not server.started:
        raise typer.Exit(1)


def _close(engine: Engine, lanes: dict[str, Lane]) -> None:
    """Stop the engine, if it was not, and only then take the add-ons off."""
    from kvfold.serving.loading import close_lanes

    engine.close(drain_seconds=0)
    if engine.is_running:
        log.error("the engine is still in the midst of its work, and is left there")
        _leave(INTERRUPTED)
    close_lanes(lanes.values())


def _leave(code: int) -> NoReturn:
    """End the process here: Python's own end would abort it while a thread is at work in torch."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
