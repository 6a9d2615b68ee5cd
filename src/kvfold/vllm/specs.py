"""Anchors and window as vLLM's cache manager sees them: a sliding window with a lasting start.

A step's queries see its own rows without reading them back, so of a long step only what the window
holds when it has ended needs blocks. Later requests may want the others, where prefixes are cached.

vLLM lets a request share what another one has been scheduled for, from the same step on. Where
codes come late, steps run in parts that read what earlier parts wrote (`kvfold.vllm.fold`), and
what is shared may be written by a later one: there a request waits for the next step.

Preemption, prefix caching and the block pool are vLLM's own. Both the scheduler's process and the
workers need the pair below registered, which the plugin does in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class AnchorWindowSpec(SlidingWindowSpec):
    """A sliding window whose first `anchors` tokens are never freed.

    tails: steps that may be under way at once, where each gets blocks for what the window holds at
    its end and no others; 0 where all of its tokens get some. in_parts: whether steps run in parts,
    so that nothing can be shared that is written in the same step.
    """

    anchors: int = 0
    tails: int = 0
    in_parts: bool = False

    @property
    def anchor_blocks(self) -> int:
        """Blocks that hold anchors."""
        return int(cdiv(self.anchors, self.block_size))

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """The most blocks that a request can hold at once."""
        sliding = int(super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len))
        if self.tails:
            window = cdiv(self.sliding_window - 1, self.block_size) + 1
            sliding = min(sliding, (1 + self.tails) * window)
        most: int = cdiv(max_model_len, self.block_size) + 1
        return min(sliding + self.anchor_blocks, most)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """Whether all specs keep the same tokens."""
        return all(
            isinstance(spec, AnchorWindowSpec)
            and (spec.sliding_window, spec.anchors, spec.tails, spec.in_parts)
            == (self.sliding_window, self.anchors, self.tails, self.in_parts)
            for spec in kv_cache_specs.values()
        )


class AnchorWindowManager(SlidingWindowManager):
    """Frees what lies between the anchors and the window."""

    def __init__(self, kv_cache_spec: AnchorWindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.freed_until: dict[str, int] = {}
        self.this_step: set[Any] = set()
        """Hashes of full blocks whose tokens are in the step that is scheduled."""

    def new_step_starts(self) -> None:
        """What was scheduled before is written by the time that this step reads it."""
        self.this_step.clear()

    def cache_blocks(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Let other requests find a request's full blocks, and note those as new."""
        name = request.request_id
        before = self.num_cached_block.get(name, 0)
        super().cache_blocks(request, *args, **kwargs)
        if self.kv_cache_spec.in_parts:
            self._note_new(request, range(before, self.num_cached_block.get(name, 0)))

    def _note_new(self, request: Any, numbers: range) -> None:
        """Note full blocks of a request as written in this step, by their numbers in it.

        Also those that no other request may take: its slots of the same tokens may be taken, beside
        a window that an earlier request has left there.
        """
        hashes = resolve_block_hashes(
            request.block_hashes, self.block_pool.hash_block_size, self.block_size
        )
        self.this_step.update(
            make_block_hash_with_group_id(hashes[number], self.kv_cache_group_id)
            for number in numbers
        )

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free the blocks between the anchors' and the window's."""
        skipped = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        blocks = self.req_to_blocks.get(request_id, [])
        start = self.freed_until.get(request_id, self.kv_cache_spec.anchor_blocks)
        stop = min(skipped, len(blocks))
        if start >= stop:
            return
        held = [block for block in blocks[start:stop] if not block.is_null]
        blocks[start:stop] = [self._null_block] * (stop - start)
        self.freed_until[request_id] = stop
        # The pool takes the first ones again first: those at the end serve fewer other prompts.
        self.block_pool.free_blocks(reversed(held))

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Forget a request; its blocks, in order."""
        self.freed_until.pop(request_id, None)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks

    def _left_out(self, held: int, num_tokens: int) -> range:
        """Numbers of blocks beyond those held that the window has left when a step has ended."""
        spec = self.kv_cache_spec
        if not spec.tails:
            return range(0)
        stop = self.get_num_skipped_tokens(num_tokens) // self.block_size
        return range(max(held, spec.anchor_blocks), stop)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        """Blocks up to the step's end, the null block for those that are left out."""
        held = self.req_to_blocks[request_id]
        left_out = self._left_out(len(held), num_tokens)
        new: list[Any] = []
        if left_out:
            until = left_out.start * self.block_size
            new += super().allocate_new_blocks(request_id, until, until)
            nothing = [self._null_block] * len(left_out)
            held.extend(nothing)
            new += nothing
        new += super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        return new

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        """A hit needs the anchors' blocks as well as the window's."""
        blocks, hit = super().find_longest_cache_hit(
            block_hashes,
            max_length,
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            drop_eagle_block,
            alignment_tokens,
            dcp_world_size,
            pcp_world_size,
        )
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for number in range(min(kv_cache_spec.anchor_blocks, len(blocks[0]))):
            cached = block_pool.get_cached_block(hashes[number], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in kv_cache_group_ids), 0
            for found, block in zip(blocks, cached, strict=True):
                found[number] = block
        return blocks, hit

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: Any,
        *args: Any,
        **kwargs: Any,
    ) -> list[bool] | None:
        """Which blocks may serve a later hit: the anchors' always."""
        mask: list[bool] | None = super().reachable_block_mask(
            start_block, end_block, alignment_tokens, kv_cache_spec, *args, **kwargs
        )
        if mask is not None:
            for block in range(start_block, min(end_block, kv_cache_spec.anchor_blocks)):
                mask[block - start_block] = True
        return mask

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Take a hit's blocks; the base class drops all below the window, anchors too."""
        anchors = [
            block
            for block in new_computed_blocks[: self.kv_cache_spec.anchor_blocks]
            if not block.is_null
        ]
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        held = self.req_to_blocks[request_id]
        for number, block in enumerate(anchors):
            if number < len(held) and held[number].is_null:
                self.block_pool.touch([block])
                held[number] = block

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """Counts cached anchor blocks, which `add_local_computed_blocks` takes from the pool, and
        none that are left out. Whole prompts are admitted by the most that they hold at once.

        More than there are where a hit is not written yet: then the request waits for a step.
        """
        if any(b.block_hash in self.this_step for b in new_computed_blocks if not b.is_null):
            return int(self.block_pool.num_gpu_blocks) + 1
        count: int = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )
        if not kwargs.get("apply_admission_cap", False):
            held = len(self.req_to_blocks.get(request_id, ()))
            count -= len(self._left_out(held, num_tokens))
        if request_id not in self.num_cached_block:
            skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
            anchors = new_computed_blocks[: min(skipped, self.kv_cache_spec.anchor_blocks)]
            count += self._get_num_evictable_blocks(anchors)
        return count


def register_specs() -> None:
    """Tell vLLM which manager serves `AnchorWindowSpec`."""
    # The table's own entries come first: it adds them only while it is empty.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        AnchorWindowSpec, AnchorWindowManager, uniform_type_base_spec=AnchorWindowSpec
    )
