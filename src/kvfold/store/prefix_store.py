"""A store of folded caches by what they have read: a text goes on from its longest known prefix.

A snapshot's name tells its maker and its text. Ids are hashed in a chain, block by block, from the
maker's identity on: h_0 = H(identity), h_k = H(h_{k-1}, ids of block k). A text of n tokens has
the name `h_k - n - H(h_k, the ids beyond)` with k = floor(n / block). So a lookup hashes a text
once, and sees from the names alone which files are prefixes of it, longest first; prompts that
share their beginning, and conversations that grow, meet in the chain. What a name promises is
compared with the file before it is used: the maker, every token, every byte.

A folded cache can't go back, so a prefix is found only where a cache was kept: keep one at the end
of what texts will share (a system prompt), and one at the end of a turn.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from kvfold.errors import SnapshotError
from kvfold.plan import Plan
from kvfold.runtime.attach import Attachment
from kvfold.runtime.cache import FoldedCache
from kvfold.runtime.state import RowState, compacted
from kvfold.store.identity import Identity
from kvfold.store.places import Entry, Place, place_at
from kvfold.store.snapshot import FORMAT_VERSION, Snapshot

log = logging.getLogger(__name__)

BLOCK = 64
DEFAULT_BYTES = 4 * 2**30
HASH_BYTES = 16
_HASH = f"[0-9a-f]{{{2 * HASH_BYTES}}}"
NAME = re.compile(rf"{_HASH}-([0-9]{{8,12}})-{_HASH}")
"""Of a stored cache: its whole blocks, its tokens, all that it has read."""


def resumes_as_cold(plan: Plan) -> bool:
    """Whether a text that goes on from a stored prefix is read as if it were run from its start.

    So it is with folded prefills that skip nothing. Else it is read as a second turn would be:
    what an exact prefill shows of earlier tokens, and what skipping replays, depends on where a
    call began.
    """
    return plan.prefill_attention == "folded" and plan.prefill == "full"


@dataclass(frozen=True)
class Found:
    """A stored prefix: how many of the text's tokens it has read, and the row that goes on."""

    name: str
    tokens: int
    state: RowState
    file_bytes: int


class PrefixStore:
    """A folder, or an fsspec URL, of snapshots of single rows.

    max_bytes: what all files of the store may take; those used longest ago go first. Files by
    other names, which the store did not give, are neither counted nor dropped. block: tokens that
    are hashed at once, and the fewest worth keeping. Safe for several processes on one local
    folder.
    """

    def __init__(
        self, where: str | Path, *, max_bytes: int = DEFAULT_BYTES, block: int = BLOCK
    ) -> None:
        if max_bytes < 1 or block < 1:
            raise SnapshotError(
                f"a store needs max_bytes and block of at least 1; got {max_bytes} and {block}"
            )
        self.place = store_place(where)
        self.max_bytes = max_bytes
        self.block = block
        self._identities: WeakKeyDictionary[Attachment, Identity] = WeakKeyDictionary()

    def keep(self, cache: FoldedCache, row: int = 0) -> str | None:
        """Store one row of a cache as it is now; see `keep_state`."""
        owner = cache.owner
        assert isinstance(owner, Attachment)
        return self.keep_state(owner, owner.rows_of(cache, [row])[0])

    def keep_state(self, attachment: Attachment, state: RowState) -> str | None:
        """Store a row that `attachment.rows_of` gave; returns its name.

        None, with a line in the log, where it is not kept: shorter than a block, with tokens that
        came as embeddings, or larger than the whole store. One that is there counts as used.
        """
        ids = state.token_ids.cpu().numpy().astype("<i4")
        if len(ids) < self.block or int(ids.min()) < 0:
            log.info("not kept: %d tokens, of which a block or some ids are missing", len(ids))
            return None
        identity = self.identity(attachment)
        name = _Chain(identity, ids, self.block).name(len(ids))
        if any(entry.name == name for entry in self.place.entries()):
            self.place.touch(name)
            return name
        content = Snapshot(identity, (compacted(attachment, state),)).to_bytes()
        if len(content) > self.max_bytes:
            log.warning(
                "not kept: a snapshot of %d tokens takes %d bytes and the store at most %d",
                len(ids), len(content), self.max_bytes,
            )  # fmt: skip
            return None
        self.place.write(name, content, self.max_bytes)
        return name

    def longest(
        self, attachment: Attachment, ids: Sequence[int], *, leave: int = 1
    ) -> Found | None:
        """The longest stored prefix of a text; it counts as used now.

        ids: the text's tokens. leave: how many of them must be left to run, since a cache has no
        logits. A file that is damaged, foreign or holds other tokens than its name says is dropped
        with a warning in the log, and the next shorter one is tried.
        """
        text = np.asarray(ids, dtype="<i4")
        identity = self.identity(attachment)
        for entry, tokens in self._prefixes(identity, text, len(text) - leave):
            try:
                state = self._read(entry.name, attachment, identity)
                if state is None:
                    continue
                _require_same(state, text[:tokens])
            except SnapshotError as error:
                log.warning("dropped the stored cache %s: %s", entry.name, error)
                self.place.remove(entry.name)
                continue
            self.place.touch(entry.name)
            return Found(entry.name, tokens, state, entry.size)
        return None

    def _prefixes(self, identity: Identity, text: np.ndarray, most: int) -> list[tuple[Entry, int]]:
        """Files that by their names are prefixes of at most so many tokens, longest first."""
        chain = _Chain(identity, text, self.block)
        found = []
        for entry in self.place.entries():
            tokens = tokens_of(entry.name)
            if tokens is not None and 0 < tokens <= most and chain.name_fits(entry.name, tokens):
                found.append((entry, tokens))
        return sorted(found, key=lambda pair: -pair[1])

    def _read(self, name: str, attachment: Attachment, identity: Identity) -> RowState | None:
        """The row in a file; None if another process has dropped it meanwhile."""
        content = self.place.read(name)
        if content is None:
            return None
        snapshot = Snapshot.read(io.BytesIO(content), len(content), attachment, identity=identity)
        if len(snapshot.rows) != 1:
            raise SnapshotError(f"a stored cache is one row; this one has {len(snapshot.rows)}")
        return snapshot.rows[0]

    def identity(self, attachment: Attachment) -> Identity:
        """Of what an attachment makes; worked out once."""
        if attachment not in self._identities:
            self._identities[attachment] = Identity.of(attachment)
        return self._identities[attachment]


def _require_same(state: RowState, text: np.ndarray) -> None:
    if not np.array_equal(state.token_ids.numpy(), text):
        raise SnapshotError("its tokens are not those that its name stands for")


def store_place(where: str | Path) -> Place:
    """Where a store keeps its files; of all that lies there, only those by names of its own."""
    return place_at(where, lambda name: tokens_of(name) is not None)


def tokens_of(name: str) -> int | None:
    """How many tokens a stored cache has read, by its name; None if it is no such name."""
    found = NAME.fullmatch(name)
    return None if found is None else int(found[1])


def short_names(names: Sequence[str], least: int) -> dict[str, str]:
    """Of each name the beginning of its last part, of at least so many digits, alike for all.

    The last part tells every snapshot from the others; the first is the same where texts begin
    alike. `names_like` finds a name by it.
    """
    last = {name: _text(name) for name in names}
    for digits in range(least, 2 * HASH_BYTES):
        if len({text[:digits] for text in last.values()}) == len(last):
            return {name: text[:digits] for name, text in last.items()}
    return last


def names_like(names: Sequence[str], given: str) -> list[str]:
    """Those of which the whole or the last part begins so."""
    return [name for name in names if name.startswith(given) or _text(name).startswith(given)]


def _text(name: str) -> str:
    """The hash of all that a stored cache has read."""
    return name.rpartition("-")[2]


class _Chain:
    """The names of all prefixes of one text under one maker."""

    def __init__(self, identity: Identity, ids: np.ndarray, block: int) -> None:
        self.ids, self.block = ids, block
        seed = f"kvfold {FORMAT_VERSION} {block} {identity.digest}".encode()
        self.heads = [_hash(seed)]
        for stop in range(block, len(ids) + 1, block):
            self.heads.append(_hash(self.heads[-1] + ids[stop - block : stop].tobytes()))

    def name(self, tokens: int) -> str:
        """Of the first so many tokens."""
        blocks = tokens // self.block
        head = self.heads[blocks]
        whole = _hash(head + self.ids[blocks * self.block : tokens].tobytes())
        return f"{head.hex()}-{tokens:08d}-{whole.hex()}"

    def name_fits(self, name: str, tokens: int) -> bool:
        """The same as equality with `name`, without hashing where the blocks tell already."""
        head = self.heads[tokens // self.block].hex()
        return name.startswith(head) and name == self.name(tokens)


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:HASH_BYTES]
