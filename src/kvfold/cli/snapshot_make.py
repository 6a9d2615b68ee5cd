"""`kvfold snapshot make`: a prompt is run, and its folded cache kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.generate import encode_prompt, read_prompt
from kvfold.cli.options import (
    AnchorsOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KeepWindowOption,
    ModelArgument,
    ResidentOption,
    console,
    load_addons,
    load_model,
    only_one,
)

if TYPE_CHECKING:
    from kvfold.runtime.attach import Attachment
    from kvfold.store.prefix_store import PrefixStore

MAKE = (
    "Run a prompt and keep the folded cache.\n\n"
    "With --store the snapshot goes into a store under a name made of its tokens; a prompt that "
    "begins like a stored one goes on from there, unless its plan's prefill is exact or skips "
    "layers. With --out it is one file. The prompt goes "
    "through the tokenizer's chat template if it has one (--raw leaves it as it is).\n\n"
    "Example: kvfold snapshot make smollm2-135m --addon my-addon --prompt-file long.txt "
    "--out long.kvfold"
)


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
