"""Codes as rows of bytes: what a plan's bits make of a slot, in one piece for paged memory."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kvfold.methods import Pipeline
from kvfold.methods.turboquant import LARGEST_SCALE, SCALE_BYTES, Quantised

log = logging.getLogger("vllm.kvfold")


class PackedCode:
    """One pipeline's codes: as they are, or quantised part by part and laid side by side.

    Of each part, all heads' codes come first and then their float16 scales. Slots that have no
    finite scale are told of in the log, once: vLLM knows no error of one request in a step, and
    this one reads them as NaN, which no other request does.
    """

    def __init__(self, pipeline: Pipeline, dtype: torch.dtype) -> None:
        self.pipeline = pipeline
        self.code_width = pipeline.depth.code_width
        self.dtype = dtype
        self._told = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot."""
        if self.pipeline.bits is None:
            return self.code_width * self.dtype.itemsize
        codecs = self.pipeline.codecs()
        return sum(part.heads * (codec.row_bytes + SCALE_BYTES) for part, codec in codecs)

    def pack(self, codes: Tensor) -> Tensor:
        """Codes (n, code_width) to bytes (n, row_bytes), uint8."""
        if self.pipeline.bits is None:
            return codes.to(self.dtype).contiguous().view(torch.uint8)
        pieces, start = [], 0
        for part, codec in self.pipeline.codecs():
            stop = start + part.heads * part.width
            vectors = codes[:, start:stop].reshape(len(codes), part.heads, part.width)
            stored = codec.encode(vectors)
            self._tell_of_infinite(stored.scales)
            pieces.append(stored.codes.flatten(1))
            pieces.append(stored.scales.flatten(1).contiguous().view(torch.uint8))
            start = stop
        return torch.cat(pieces, dim=1)

    def unpack(self, rows: Tensor, *, rotated: bool = False) -> Tensor:
        """Bytes (n, row_bytes) to codes (n, code_width).

        rotated: whether quantised codes stay in their own basis, see `Pipeline.rotated`.
        """
        if self.pipeline.bits is None:
            return rows.contiguous().view(self.dtype)
        pieces, start = [], 0
        for part, codec in self.pipeline.codecs():
            middle = start + part.heads * codec.row_bytes
            stop = middle + part.heads * SCALE_BYTES
            codes = rows[:, start:middle].reshape(len(rows), part.heads, codec.row_bytes)
            scales = rows[:, middle:stop].contiguous().view(torch.float16)
            stored = Quantised(codes, scales[..., None], codec.signature)
            decode = codec.decode_rotated if rotated else codec.decode
            pieces.append(decode(stored, dtype=self.dtype).flatten(1))
            start = stop
        return torch.cat(pieces, dim=1)

    def _tell_of_infinite(self, scales: Tensor) -> None:
        if self._told or bool(torch.isfinite(scales).all()):
            return
        self._told = True
        log.error(
            "kvfold: slots of layers %s have a root mean square above %s or are not finite, and "
            "can't be quantised; answers that read them are worthless. Leave these layers out of "
            "the plan's bits",
            list(self.pipeline.layers),
            f"{LARGEST_SCALE:,.0f}",
        )
