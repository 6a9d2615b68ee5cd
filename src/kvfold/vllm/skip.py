"""Prefill skipping below vLLM's own attention backends: fewer rows for the upper layers.

The layers from the split on get a backend of their own, a subclass of the stock one, whose
metadata builder sees the step and keeps, of each request's new tokens, the last `replay` and the
anchors. The anchors become a request of their own, on the same blocks and as long as themselves.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import subclass_attention_backend


class KeptRows(NamedTuple):
    """Rows of a step that run through the upper layers, in pieces of neighbouring rows.

    rows: (kept,) into the step's tokens. lengths: of each piece. requests: whose it is. seen:
    tokens of that request up to the piece's end.
    """

    rows: Tensor
    lengths: list[int]
    requests: list[int]
    seen: list[int]


def kept_rows(starts: list[int], seen: list[int], replay: int, anchors: int) -> KeptRows | None:
    """What runs through the upper layers; None if that is everything.

    starts: where each request's rows begin, and the end of the last. seen: tokens of each request
    after this step. replay: last tokens that are kept of each, beside `anchors` first ones.
    """
    rows: list[Tensor] = []
    lengths: list[int] = []
    requests: list[int] = []
    ends: list[int] = []
    for request, after in enumerate(seen):
        start, stop = starts[request], starts[request + 1]
        before = after - (stop - start)
        first = max(0, min(anchors - before, stop - start))
        pieces = [(start, stop, after)]
        if stop - start > replay + first:
            pieces = [(stop - replay, stop, after)]
            if first:
                pieces.insert(0, (start, start + first, before + first))
        for begin, end, until in pieces:
            rows.append(torch.arange(begin, end))
            lengths.append(end - begin)
            requests.append(request)
            ends.append(until)
    if sum(lengths) == starts[-1]:
        return None
    return KeptRows(torch.cat(rows), lengths, requests, ends)


def step_of(common: Any) -> tuple[list[int], list[int]]:
    """Where each request's rows begin in a step, and its tokens after it, on the CPU."""
    seen = common.seq_lens_cpu_upper_bound
    seen = common.seq_lens.cpu() if seen is None else seen
    return common.query_start_loc_cpu.tolist(), seen[: common.num_reqs].tolist()


def trimmed(common: Any, replay: int, anchors: int) -> tuple[Any, Tensor | None]:
    """A step's metadata with only the rows that are kept, and those rows (None: all)."""
    if common.max_query_len <= replay:  # decoding and short prompts cost nothing here
        return common, None
    kept = kept_rows(*step_of(common), replay, anchors)
    if kept is None:
        return common, None
    return cut(common, kept), kept.rows.to(common.query_start_loc.device)


def cut(common: Any, kept: KeptRows) -> Any:
    """A step's metadata with some rows only, each piece of them as a request of its own."""
    device = common.query_start_loc.device
    starts = _running_sum(kept.lengths)
    seen = torch.tensor(kept.seen, dtype=torch.int32)
    requests = torch.tensor(kept.requests, dtype=torch.long)
    rows = kept.rows.to(device)
    prefilling, positions = common.is_prefilling, common.positions
    return common.replace(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seen.to(device),
        seq_lens_cpu_upper_bound=seen,
        num_reqs=len(kept.lengths),
        num_actual_tokens=len(rows),
        max_query_len=max(kept.lengths),
        max_seq_len=max(kept.seen),
        block_table_tensor=common.block_table_tensor[requests.to(device)],
        slot_mapping=common.slot_mapping[rows],
        positions=None if positions is None else positions[..., rows],
        is_prefilling=None if prefilling is None else prefilling[requests],
        req_idx=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


def _running_sum(lengths: list[int]) -> Tensor:
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(lengths).cumsum(0)
    return starts


@functools.cache
def trimmed_backend(base: Any, replay: int, anchors: int) -> Any:
    """A stock attention backend whose metadata holds only the rows that are kept.

    They are in the metadata's `kvfold_rows`, None where all are.
    """
    stock: Any = base.get_builder_cls()

    class TrimmedBuilder(stock):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any) -> Any:
            common, rows = trimmed(common_attn_metadata, replay, anchors)
            made = super().build(common_prefix_len, common, *args)
            made.kvfold_rows = rows
            return made

    return subclass_attention_backend("KvfoldSkip", base, TrimmedBuilder)
