"""Prompts' caches in a store on disk, written by a thread of their own.

A snapshot is whole, so keeping one at every block of every prompt would write the same beginning
many times. Kept are the last whole block of a prompt, for the next turn of a conversation, and the
place where a prompt parts from an earlier one, for all that begin like both (a system prompt).
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.runtime.attach import Attachment
from kvfold.runtime.state import RowState
from kvfold.serving.plain_rows import cache_of, row_of
from kvfold.serving.prefix import FoundPrefix
from kvfold.store.prefix_store import PrefixStore

BLOCK = 256
"""Tokens between places where a cache may be kept: fewer find more, more take fewer pauses."""
WAITING = 8
"""Copies that may wait for the disk; more are not kept."""
REMEMBERED = 65_536
"""Beginnings of prompts that are remembered, by their hashes."""

log = logging.getLogger(__name__)


class StoredPrefixes:
    """`PrefixCaches` of one attachment over a store; several may share the store.

    block: tokens between the places where a cache may be kept. plain: whether caches are
    transformers' own, and the attachment one that folds nothing (`plain_rows.folding_nothing`).
    """

    def __init__(
        self,
        store: PrefixStore,
        attachment: Attachment,
        *,
        block: int = BLOCK,
        plain: bool = False,
    ) -> None:
        self.store = store
        self.plain = plain
        self.attachment = attachment
        self.block = block
        store.identity(attachment)  # reads all weights of the add-on: not in the first request
        self._begun: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: queue.Queue[RowState | None] = queue.Queue(WAITING)
        self._writer = threading.Thread(target=self._write, name="kvfold-store", daemon=True)
        self._writer.start()

    def longest(self, prompt: Sequence[int]) -> FoundPrefix | None:
        """See `PrefixCaches`. A store that can't be read is a miss, with a line in the log."""
        try:
            found = self.store.longest(self.attachment, prompt, leave=1)
            if found is None:
                return None
            cache = self._cache_of(found.state)
        except (KvfoldError, OSError) as error:
            log.warning("the store was not read: %s", error)
            return None
        return FoundPrefix(cache, found.tokens)

    def _cache_of(self, state: RowState) -> Any:
        if self.plain:
            return cache_of(self.attachment, state)
        return self.attachment.cache_from([state])

    def _row_of(self, tokens: Sequence[int], cache: Any) -> RowState:
        if self.plain:
            return row_of(self.attachment, cache, tokens)
        return self.attachment.rows_of(cache, [0])[0]

    def put(self, prompt: Sequence[int], length: int, cache: Any) -> None:
        """See `PrefixCaches`."""
        if not self._is_worth_keeping(prompt, length):
            return
        state = self._row_of(prompt[:length], cache)
        try:
            self._waiting.put_nowait(state)
        except queue.Full:
            log.warning("not kept: %d caches wait for the disk already", WAITING)

    def _is_worth_keeping(self, prompt: Sequence[int], length: int) -> bool:
        """Whether the prompt has no further block, or parts here from an earlier one's.

        Not at its very end: the same prompt must leave a token to run, and finds the block before.
        """
        end = len(prompt) - 1
        last = length <= end < length + self.block
        here = self._note(prompt[:length])
        further = length + self.block <= end
        parts = here and further and not self._knows(prompt[: length + self.block])
        return last or parts

    def _note(self, tokens: Sequence[int]) -> bool:
        """Remember a beginning; returns whether it was known."""
        key = _key(tokens)
        known = key in self._begun
        self._begun[key] = None
        self._begun.move_to_end(key)
        if len(self._begun) > REMEMBERED:
            self._begun.popitem(last=False)
        return known

    def _knows(self, tokens: Sequence[int]) -> bool:
        return _key(tokens) in self._begun

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._waiting.put(None)
        self._writer.join()

    def _write(self) -> None:
        while (state := self._waiting.get()) is not None:
            try:
                self.store.keep_state(self.attachment, state)
            except (KvfoldError, OSError) as error:
                log.warning("a cache of %d tokens was not kept: %s", state.seen_tokens, error)
            except Exception:  # whatever it is, the next one may do
                log.exception("a cache of %d tokens was not kept", state.seen_tokens)


def _key(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).digest()
