"""A folded cache on disk: complete, told apart by who made it, refused if anything is off.

This is the public door to caches on disk, and not a method of `FoldedCache`: the runtime knows
nothing of files. It gives rows in plain form (`Attachment.rows_of`) and takes them back
(`Attachment.cache_from`); what a snapshot adds is the identity, the checksum and the file.

    Snapshot.of(cache).save("prompt.kvfold")
    cache = Snapshot.load("prompt.kvfold").restore(attachment)
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kvfold.errors import AttachError, CacheError, SnapshotError
from kvfold.runtime.attach import Attachment
from kvfold.runtime.cache import FoldedCache
from kvfold.runtime.state import RowState, check_row, compacted
from kvfold.store.folder import write_file
from kvfold.store.identity import Identity
from kvfold.store.snapshot_file import Header, encode, read_header, read_tensors

FORMAT_VERSION = 1
IDS = "token_ids"


@dataclass(frozen=True)
class Description:
    """What a file says of itself: who made it, and how many tokens each row has seen."""

    identity: Identity
    rows: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the format's version."""
        return {
            "format_version": FORMAT_VERSION,
            "identity": self.identity.to_dict(),
            "rows": list(self.rows),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Description:
        """Read what `to_dict` made; raises `SnapshotError` for anything else."""
        version, rows = data.get("format_version"), data.get("rows")
        if version != FORMAT_VERSION:
            raise SnapshotError(
                f"this kvfold reads snapshots of format version {FORMAT_VERSION}; this one has "
                f"version {version!r}; make it anew, or use the kvfold that wrote it"
            )
        if not isinstance(rows, list) or not all(type(n) is int and n >= 0 for n in rows):
            raise SnapshotError(
                f"a snapshot must say how many tokens each row has seen; got {rows!r}; make it anew"
            )
        return cls(Identity.from_dict(data.get("identity")), tuple(rows))


@dataclass(frozen=True)
class Snapshot:
    """Rows of a cache in plain form, and who made them."""

    identity: Identity
    rows: tuple[RowState, ...]

    @classmethod
    def of(
        cls,
        cache: FoldedCache,
        rows: Sequence[int] | None = None,
        *,
        identity: Identity | None = None,
    ) -> Snapshot:
        """Of a cache as it is now; it may go on meanwhile.

        rows: which, all by default. identity: of its attachment, if that is known already. Raises
        `CacheError` for a cache that failed half-way.
        """
        owner = cache.owner
        if not isinstance(owner, Attachment):
            raise AttachError(
                "a snapshot is made of a cache that an attachment made; got one of "
                f"{type(owner).__name__}; use attachment.new_cache()"
            )
        states = [compacted(owner, state) for state in owner.rows_of(cache, rows)]
        return cls(Identity.of(owner) if identity is None else identity, tuple(states))

    def to_bytes(self) -> bytes:
        """The content of its file."""
        tensors = {}
        for row, state in enumerate(self.rows):
            held = {IDS: state.token_ids, **state.tensors}
            for name, tensor in held.items():
                # Views of one storage would count as shared, and be written with all of it.
                own = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                tensors[f"rows.{row}.{name}"] = own
        counts = tuple(state.seen_tokens for state in self.rows)
        return encode(Description(self.identity, counts).to_dict(), tensors)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write it to a file, whole or not at all; returns the file's bytes."""
        content = self.to_bytes()
        write_file(Path(path).absolute(), content)
        return len(content)

    @classmethod
    def load(cls, path: str | os.PathLike[str], attachment: Attachment | None = None) -> Snapshot:
        """Read a file and check every byte of it.

        attachment: what it must belong to, which is then checked before any tensor is read. Raises
        `SnapshotError` for a file that is missing, damaged, cut off, or of another maker.
        """
        with open_snapshot(path) as file:
            size = os.fstat(file.fileno()).st_size
            return cls.read(file, size, attachment, source=str(path))

    @classmethod
    def from_bytes(
        cls, content: bytes | memoryview, attachment: Attachment | None = None
    ) -> Snapshot:
        """The same from a file's content."""
        return cls.read(io.BytesIO(content), len(content), attachment)

    @classmethod
    def read(
        cls,
        file: BinaryIO,
        size: int,
        attachment: Attachment | None = None,
        *,
        identity: Identity | None = None,
        source: str = "the snapshot",
    ) -> Snapshot:
        """The same from an open file of so many bytes.

        identity: the attachment's, if that is known already. source: its name in messages.
        """
        try:
            header = read_header(file, size)
            described = Description.from_dict(header.description)
            parts = _by_row(header, described)
            if attachment is not None:
                described.identity.check(Identity.of(attachment) if identity is None else identity)
                for seen, found in zip(described.rows, parts, strict=True):
                    check_row(attachment, seen, found)
            tensors = read_tensors(header, file)
        except (SnapshotError, CacheError) as error:
            raise SnapshotError(f"{source}: {error}") from error
        rows = []
        for row, found in enumerate(parts):
            ids = tensors[f"rows.{row}.{IDS}"]
            own = {name: tensors[f"rows.{row}.{name}"] for name in found}
            rows.append(RowState(ids, own))
        return cls(described.identity, tuple(rows))

    def restore(self, attachment: Attachment, rows: Sequence[int] | None = None) -> FoldedCache:
        """A cache that goes on from here, of all rows or of some.

        Rows of unequal length end in the same column: see `Attachment.cache_from`. Raises
        `SnapshotError`, saying what differs, unless this attachment makes the same caches.
        """
        self.identity.check(Identity.of(attachment))
        chosen = self.rows if rows is None else [self.rows[row] for row in rows]
        try:
            return attachment.cache_from(chosen)
        except CacheError as error:
            raise SnapshotError(str(error)) from error


def describe_snapshot(path: str | os.PathLike[str]) -> Description:
    """What a file says of itself, from its header alone: `Snapshot.load` also checks the rest."""
    with open_snapshot(path) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
    return Description.from_dict(header.description)


def open_snapshot(path: str | os.PathLike[str]) -> BinaryIO:
    """The file of a snapshot; raises `SnapshotError` where there is none, or no regular file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise SnapshotError(f"a snapshot is a regular file; {path} is none; name another")
        return open(path, "rb")
    except OSError as error:
        raise SnapshotError(
            f"a snapshot is one file, as `kvfold snapshot make` writes it; {path} can't be opened "
            f"({error.strerror}); check the path"
        ) from error


_OF_ROW = re.compile(r"rows\.(0|[1-9][0-9]{0,8})\.(.+)")
Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _by_row(header: Header, described: Description) -> list[Parts]:
    """Each row's tensors by their own names, its token ids apart."""
    found: list[Parts] = [{} for _ in described.rows]
    for name, part in header.parts.items():
        match = _OF_ROW.fullmatch(name)
        if match is None or int(match[1]) >= len(found):
            raise SnapshotError(f"a snapshot has tensors of its rows only; got {name!r}")
        found[int(match[1])][match[2]] = part
    for row, (seen, parts) in enumerate(zip(described.rows, found, strict=True)):
        if parts.pop(IDS, None) != ((seen,), torch.int32):
            raise SnapshotError(f"row {row} must have ids of its {seen} tokens; make it anew")
    return found
