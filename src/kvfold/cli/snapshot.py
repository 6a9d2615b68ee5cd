"""`kvfold snapshot`: folded caches on disk, made, listed, shown, checked and removed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.options import JsonOption, console
from kvfold.cli.snapshot_make import MAKE, make_command

if TYPE_CHECKING:
    from rich.table import Table

    from kvfold.store.snapshot import Description

HELP = (
    "Keep folded caches on disk.\n\n"
    "A snapshot is what a model remembers of a text, folded: reading it back is many times "
    "quicker than running the text again, and gives the same next tokens. It belongs to one "
    "model, add-on, plan and dtype, and is refused by any other; a damaged file is refused too. "
    "A store is a folder of snapshots with a budget of bytes, in which a text finds its longest "
    "known prefix.\n\n"
    "Try: kvfold snapshot make smollm2-135m --addon my-addon --prompt-file long.txt --store cache"
)
LIST = (
    "List the snapshots of a store, last used first.\n\nExample: kvfold snapshot list --store cache"
)
SHOW = (
    "Say who made a snapshot, and what it holds.\n\n"
    "Example: kvfold snapshot show long.kvfold, or kvfold snapshot show --store cache 3f2a91"
)
VERIFY = (
    "Check every byte of snapshots; a damaged one ends with exit code 2.\n\n"
    "Whether a snapshot fits a model is checked when it is used.\n\n"
    "Example: kvfold snapshot verify --store cache, or kvfold snapshot verify long.kvfold"
)
REMOVE = (
    "Remove snapshots: files by path, or those of a store by what `list` shows of their names, or "
    "the beginning of a whole name.\n\n"
    "Example: kvfold snapshot rm --store cache 3f2a91, or kvfold snapshot rm --store cache --all"
)
SHORT = 12
FAILURE = 2


def local_path(text: str) -> Path:
    """A path of this machine; raises `typer.BadParameter` for a URL."""
    if "://" in text:
        raise typer.BadParameter(
            f"only folders and files of this machine can be looked at here; {text} is a URL "
            "(kvfold snapshot make and kvfold serve can use it as a store)"
        )
    return Path(text)


StoreOption = Annotated[
    Path | None, typer.Option(metavar="STORE", help="A store's folder.", parser=local_path)
]


def register(app: typer.Typer) -> None:
    """Add the group of subcommands."""
    group = typer.Typer(name="snapshot", help=HELP, no_args_is_help=True)
    group.command("make", help=MAKE)(make_command)
    group.command("list", help=LIST)(list_command)
    group.command("show", help=SHOW)(show_command)
    group.command("verify", help=VERIFY)(verify_command)
    group.command("rm", help=REMOVE)(remove_command)
    app.add_typer(group)


def list_command(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="STORE", help="The same as --store.", parser=local_path),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List; see LIST."""
    from kvfold.store.prefix_store import tokens_of

    if (folder is None) == (store is None):
        raise typer.BadParameter("say once which store: --store STORE")
    store = store or folder
    assert store is not None
    entries = sorted(_entries(store), key=lambda entry: -entry.used)
    rows = [
        {
            "name": entry.name,
            "tokens": tokens_of(entry.name),
            "file_bytes": entry.size,
            "last_used": datetime.fromtimestamp(entry.used / 1e9, UTC).isoformat("T", "seconds"),
            "model": _model_of(store, entry.name),
        }
        for entry in entries
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    console().print(_list_table(rows))


def _list_table(rows: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    from kvfold.evaluation.report import readable_bytes
    from kvfold.store.prefix_store import short_names

    total = sum(row["file_bytes"] for row in rows)
    table = Table(
        box=box.ROUNDED, title=f"{_counted(len(rows))}, {readable_bytes(total)}", title_style=""
    )
    shown = short_names([row["name"] for row in rows], SHORT)
    for heading in ("name", "model", "tokens", "bytes", "last used"):
        right = heading in ("tokens", "bytes")
        table.add_column(
            heading,
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=heading == "name",
        )
    for row in rows:
        tokens = "?" if row["tokens"] is None else f"{row['tokens']:,}"
        table.add_row(
            shown[row["name"]], row["model"], tokens, readable_bytes(row["file_bytes"]),
            row["last_used"],
        )  # fmt: skip
    return table


def _counted(snapshots: int) -> str:
    return f"{snapshots} snapshot{'' if snapshots == 1 else 's'}"


def _entries(store: Path) -> list[Any]:
    from kvfold.store.prefix_store import store_place

    if not store.is_dir():
        raise typer.BadParameter(f"there is no store {store}; kvfold snapshot make makes one")
    return store_place(store).entries()


def _model_of(store: Path, name: str) -> str:
    from kvfold.errors import SnapshotError
    from kvfold.store.places import SUFFIX
    from kvfold.store.snapshot import describe_snapshot

    try:
        return describe_snapshot(store / f"{name}{SUFFIX}").identity.model_name
    except SnapshotError:
        return "damaged"


def show_command(
    which: Annotated[
        str,
        typer.Argument(
            metavar="FILE|NAME",
            help="A snapshot's file, or with --store a name, or its beginning, as `list` shows.",
        ),
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show; see SHOW."""
    from kvfold.store.snapshot import describe_snapshot

    path = local_path(which) if store is None else _file_of(store, which)
    described = describe_snapshot(path)
    size = path.stat().st_size
    if as_json:
        typer.echo(json.dumps({**described.to_dict(), "file_bytes": size}, indent=1))
        return
    console().print(_show_table(described, size))


def _file_of(store: Path, name: str) -> Path:
    from kvfold.store.places import SUFFIX

    stored = [entry.name for entry in _entries(store)]
    return store / f"{_only_one(store, stored, name)}{SUFFIX}"


def _show_table(described: Description, size: int) -> Table:
    from rich import box
    from rich.table import Table

    from kvfold.evaluation.report import readable_bytes

    identity = described.identity
    readings = ", ".join(sorted(set(identity.resident.values()))) or "no folded layer"
    table = Table(box=box.ROUNDED, show_header=False)
    for key, value in (
        ("model", f"{identity.model_name} ({identity.model[:SHORT]})"),
        ("add-on", identity.addon[:SHORT]),
        ("dtype", identity.dtype),
        ("rows", ", ".join(f"{tokens:,} tokens" for tokens in described.rows)),
        ("bytes", f"{size:,} ({readable_bytes(size)})"),
        ("history read", readings),
        ("plan", json.dumps({k: v for k, v in identity.plan.items() if v not in ([], None)})),
    ):
        table.add_row(key, value)
    return table


def verify_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH", help="Snapshot files, or stores of them.", parser=local_path
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check; see VERIFY."""
    from kvfold.errors import SnapshotError
    from kvfold.store.snapshot import Snapshot

    chosen = [*(paths or []), *([] if store is None else [store])]
    if not chosen:
        raise typer.BadParameter("say what to check: --store STORE, or snapshot files")
    if store is not None:
        _entries(store)  # a store that is not there is no file either
    results: list[dict[str, Any]] = []
    for path in _files(chosen):
        try:
            tokens = [row.seen_tokens for row in Snapshot.load(path).rows]
            results.append({"path": str(path), "whole": True, "tokens": tokens})
        except SnapshotError as error:
            results.append({"path": str(path), "whole": False, "reason": str(error)})
    damaged = [result for result in results if not result["whole"]]
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    else:
        screen = console()
        for result in damaged:
            screen.print(result["reason"], style="red", markup=False, highlight=False)
        screen.print(f"{len(results) - len(damaged)} whole, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(FAILURE)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    from kvfold.store.places import SUFFIX

    for path in paths:
        if path.is_dir():
            yield from sorted(found for found in path.glob(f"*{SUFFIX}") if found.is_file())
        else:
            yield path


def remove_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|NAME",
            help="Names, or their beginnings, as `list` shows; without --store a snapshot's file, "
            "or the store before the names.",
        ),
    ] = None,
    store: StoreOption = None,
    everything: Annotated[bool, typer.Option("--all", help="All snapshots of the store.")] = False,
) -> None:
    """Remove; see REMOVE."""
    names = list(names or [])
    if store is None:
        if not names:
            raise typer.BadParameter("say of which store: --store STORE, or give a snapshot's file")
        store = local_path(names.pop(0))
        if store.is_file():
            _remove_file(store, alone=not names and not everything)
            return
    if bool(names) == everything:
        raise typer.BadParameter("say which to remove: names (see kvfold snapshot list), or --all")
    from kvfold.store.prefix_store import store_place

    stored = [entry.name for entry in _entries(store)]
    chosen = stored if everything else list({_only_one(store, stored, name) for name in names})
    for name in chosen:
        store_place(store).remove(name)
    console().print(f"removed {len(chosen)} of {_counted(len(stored))}")


def _remove_file(path: Path, *, alone: bool) -> None:
    from kvfold.store.snapshot import describe_snapshot

    if not alone:
        raise typer.BadParameter(f"{path} is one snapshot; names and --all go with a store")
    describe_snapshot(path)  # nothing but a snapshot is ever removed
    path.unlink()
    console().print(f"removed {path}", markup=False)


def _only_one(store: Path, stored: Sequence[str], given: str) -> str:
    """The snapshot that is meant."""
    from kvfold.store.prefix_store import names_like

    matching = names_like(stored, given)
    if len(matching) != 1:
        raise typer.BadParameter(
            f"a name must begin like exactly one snapshot of the store; {given!r} fits "
            f"{len(matching)}; see kvfold snapshot list --store {store}"
        )
    return matching[0]
