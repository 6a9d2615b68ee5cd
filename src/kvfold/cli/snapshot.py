"""`kvfold snapshot`: folded caches on disk, made, listed, shown, checked and removed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.generate import encode_prompt, read_prompt
from kvfold.cli.options import (
    AnchorsOption,
    DeviceOption,
    DtypeOption,
    KeepWindowOption,
    ModelArgument,
    ResidentOption,
    console,
    load_addons,
    load_model,
    only_one,
)

if TYPE_CHECKING:
    from rich.table import Table

    from kvfold.runtime.attach import Attachment
    from kvfold.store.prefix_store import PrefixStore
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
MAKE = (
    "Run a prompt and keep the folded cache.\n\n"
    "With --store the snapshot goes into a store under a name made of its tokens; a prompt that "
    "begins like a stored one goes on from there, unless its plan's prefill is exact or skips "
    "layers. With --out it is one file. The prompt goes "
    "through the tokenizer's chat template if it has one (--raw leaves it as it is).\n\n"
    "Example: kvfold snapshot make smollm2-135m --addon my-addon --prompt-file long.txt "
    "--out long.kvfold"
)
LIST = "List the snapshots of a store, last used first.\n\nExample: kvfold snapshot list cache"
SHOW = "Say who made a snapshot, and what it holds.\n\nExample: kvfold snapshot show long.kvfold"
VERIFY = (
    "Check every byte of snapshots; a damaged one ends with exit code 2.\n\n"
    "Whether a snapshot fits a model is checked when it is used.\n\n"
    "Example: kvfold snapshot verify cache"
)
REMOVE = (
    "Remove snapshots: files by path, or those of a store by what `list` shows of their names, or "
    "the beginning of a whole name.\n\n"
    "Example: kvfold snapshot rm cache 3f2a91, or kvfold snapshot rm cache --all"
)
SHORT = 12
FAILURE = 2

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def local_path(text: str) -> Path:
    """A path of this machine; raises `typer.BadParameter` for a URL."""
    if "://" in text:
        raise typer.BadParameter(
            f"only folders and files of this machine can be looked at here; {text} is a URL "
            "(kvfold snapshot make and kvfold serve can use it as a store)"
        )
    return Path(text)


StoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE", help="A store's folder.", parser=local_path)
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


def make_command(
    model: ModelArgument,
    addon: Annotated[
        str, typer.Option(metavar="DIR", help="Add-on folder, shipped add-on, or hub id.")
    ],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the prompt.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one file, such as long.kvfold.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="STORE", help="Keep it in a store: a folder, or a URL such as s3://."),
    ] = None,
    budget: Annotated[
        float, typer.Option(min=0.001, metavar="GB", help="What the store may take, in GB.")
    ] = 4.0,
    raw: Annotated[bool, typer.Option("--raw", help="Leave the chat template out.")] = False,
    as_json: JsonOption = False,
    keep_window: KeepWindowOption = None,
    anchors: AnchorsOption = None,
    resident: ResidentOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Run and keep; see MAKE."""
    from kvfold.evaluation.candidates import with_plan
    from kvfold.runtime.attach import attach

    only_one(out=out, store=store)
    if out is None and store is None:
        raise typer.BadParameter("say where to keep it: --out FILE or --store STORE")
    text = read_prompt(prompt, prompt_file)
    prefixes = None if store is None else _usable_store(store, int(budget * 1e9))
    loaded, tokenizer = load_model(model, dtype, device)
    changes = {"window": keep_window, "anchors": anchors, "resident": resident}
    (found,) = load_addons([addon], loaded).values()
    ids = encode_prompt(tokenizer, text, raw=raw).to(loaded.device)
    with attach(loaded, with_plan(found, **changes), keep_codes=True) as attachment:
        made = _make(attachment, ids, out, prefixes)
    if as_json:
        typer.echo(json.dumps(made, indent=1))
        return
    _say_made(made)


def _usable_store(where: str, max_bytes: int) -> PrefixStore:
    from kvfold.store.prefix_store import PrefixStore

    made = PrefixStore(where, max_bytes=max_bytes)
    made.place.check_writable()  # before a model is loaded and a prompt is run for it
    return made


def _make(
    attachment: Attachment, ids: Any, out: Path | None, prefixes: PrefixStore | None
) -> dict[str, Any]:
    """Where the snapshot of a prompt was written, and its bytes beside the plain cache's."""
    import torch

    from kvfold.runtime.feeding import cache_argument
    from kvfold.runtime.ledger import plain_bytes
    from kvfold.store.prefix_store import resumes_as_cold
    from kvfold.store.snapshot import Snapshot

    model = attachment.model
    found = None
    if prefixes is not None and resumes_as_cold(attachment.plan):
        found = prefixes.longest(attachment, ids[0].tolist())
    cache = attachment.new_cache() if found is None else attachment.cache_from([found.state])
    known = 0 if found is None else found.tokens
    with torch.no_grad():
        model(ids[:, known:], logits_to_keep=1, **{cache_argument(model): cache})
    if prefixes is None:
        assert out is not None
        where: str | None = str(out)
        size = Snapshot.of(cache).save(out)
    else:
        where = prefixes.keep(cache)
        size = next((e.size for e in prefixes.place.entries() if e.name == where), 0)
    plain = plain_bytes(attachment.anatomy, ids.shape[1], element_size=model.dtype.itemsize)
    return {
        "kept_as": where,
        "tokens": int(ids.shape[1]),
        "tokens_from_store": known,
        "file_bytes": size,
        "plain_cache_bytes": plain.total,
        "ledger": cache.nbytes().components,
    }


def _say_made(made: dict[str, Any]) -> None:
    from kvfold.evaluation.report import readable_bytes

    screen = console()
    if made["kept_as"] is None:
        screen.print(
            f"Not kept: {made['tokens']:,} tokens are fewer than a store keeps, or more than its "
            "budget has room for.", style="yellow",
        )  # fmt: skip
        return
    size, plain = made["file_bytes"], made["plain_cache_bytes"]
    screen.print(
        f"{made['tokens']:,} tokens kept as {made['kept_as']}: {readable_bytes(size)}, "
        f"{plain / size:.1f} times smaller than the plain cache ({readable_bytes(plain)})",
        highlight=False, markup=False,
    )  # fmt: skip
    if made["tokens_from_store"]:
        screen.print(f"The first {made['tokens_from_store']:,} of them came from the store.")


def list_command(store: StoreArgument, as_json: JsonOption = False) -> None:
    """List; see LIST."""
    from kvfold.store.prefix_store import tokens_of

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
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A snapshot's file.", parser=local_path)
    ],
    as_json: JsonOption = False,
) -> None:
    """Show; see SHOW."""
    from kvfold.store.snapshot import describe_snapshot

    described = describe_snapshot(path)
    size = path.stat().st_size
    if as_json:
        typer.echo(json.dumps({**described.to_dict(), "file_bytes": size}, indent=1))
        return
    console().print(_show_table(described, size))


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
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Snapshot files, or stores of them.", parser=local_path
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Check; see VERIFY."""
    from kvfold.errors import SnapshotError
    from kvfold.store.snapshot import Snapshot

    results: list[dict[str, Any]] = []
    for path in _files(paths):
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
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A store, or a snapshot's file.", parser=local_path),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Names, or their beginnings, as `list` shows."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All snapshots of the store.")] = False,
) -> None:
    """Remove; see REMOVE."""
    from kvfold.store.snapshot import describe_snapshot

    if path.is_file():
        if names or everything:
            raise typer.BadParameter(f"{path} is one snapshot; names and --all go with a store")
        describe_snapshot(path)  # nothing but a snapshot is ever removed
        path.unlink()
        console().print(f"removed {path}", markup=False)
        return
    if bool(names) == everything:
        raise typer.BadParameter("say which to remove: names (see kvfold snapshot list), or --all")
    from kvfold.store.prefix_store import store_place

    stored = [entry.name for entry in _entries(path)]
    chosen = stored if everything else list({_only_one(path, stored, name) for name in names or ()})
    for name in chosen:
        store_place(path).remove(name)
    console().print(f"removed {len(chosen)} of {_counted(len(stored))}")


def _only_one(store: Path, stored: Sequence[str], given: str) -> str:
    """The snapshot that is meant."""
    from kvfold.store.prefix_store import names_like

    matching = names_like(stored, given)
    if len(matching) != 1:
        raise typer.BadParameter(
            f"a name must begin like exactly one snapshot of the store; {given!r} fits "
            f"{len(matching)}; see kvfold snapshot list {store}"
        )
    return matching[0]
