"""The bytes of a snapshot: a safetensors file whose metadata describes and seals it.

    8 bytes, little endian: length of the header
    header: JSON; per tensor its dtype, shape and place, and under `__metadata__`
        kvfold: JSON text, what `Snapshot` says of itself
        sha256: of the whole file with these 64 digits as zeros
    data: the tensors' bytes

Any safetensors reader opens it. Nothing in it is executed, no length that it states is believed
before the file has it, and a single changed byte anywhere is found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvfold.errors import SnapshotError

MAX_HEADER_BYTES = 64 * 2**20
MAX_FILE_BYTES = 64 * 2**30
UNSEALED = "0" * 64
DTYPES = {
    "U8": torch.uint8,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Those that a snapshot can hold."""


@dataclass(frozen=True)
class Header:
    """What a file says of itself, not yet compared with its checksum.

    raw: the file's first bytes. description: plain data. parts: shape and dtype of each tensor.
    size: bytes that the whole file must have.
    """

    raw: bytes
    description: Mapping[str, Any]
    parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    sha256: str
    size: int


def encode(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A file's bytes. tensors: contiguous, on the CPU, of storages of their own."""
    metadata = {"kvfold": json.dumps(description, sort_keys=True), "sha256": UNSEALED}
    content = bytearray(save(dict(tensors), metadata=metadata))
    place = _seal_place(bytes(content[: 8 + int.from_bytes(content[:8], "little")]), UNSEALED)
    digest = hashlib.sha256(content).hexdigest()
    content[place : place + 64] = digest.encode()
    return bytes(content)


def read_header(file: BinaryIO, size: int) -> Header:
    """The header of a file of so many bytes; raises `SnapshotError` if it isn't a snapshot."""
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or size > MAX_FILE_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, size):
        raise _damaged("it is empty, truncated, too long, or no safetensors file")
    raw = file.read(length)
    try:
        content = json.loads(raw)
        metadata = content.pop("__metadata__")
        description, digest = json.loads(metadata["kvfold"]), metadata["sha256"]
        parts = {
            name: (tuple(int(n) for n in part["shape"]), DTYPES[part["dtype"]])
            for name, part in content.items()
        }
        ends = [int(part["data_offsets"][1]) for part in content.values()]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise _damaged(f"its header can't be read ({type(error).__name__})") from error
    if not isinstance(description, dict) or not isinstance(digest, str) or len(digest) != 64:
        raise _damaged("its header is not as kvfold writes it")
    whole = 8 + length + max(ends, default=0)
    if whole != size:
        how = "it were cut off" if size < whole else "something were written behind it"
        raise _damaged(f"it must have {whole:,} bytes and has {size:,}, as if {how}")
    return Header(first + raw, description, parts, digest, whole)


def read_tensors(header: Header, file: BinaryIO) -> dict[str, Tensor]:
    """The tensors behind a header; raises `SnapshotError` unless all bytes are as written."""
    content = header.raw + file.read(header.size - len(header.raw))
    if len(content) != header.size:
        raise _damaged("it was cut off while it was read")
    place = _seal_place(header.raw, header.sha256)
    seen = hashlib.sha256(content[:place] + UNSEALED.encode())
    seen.update(memoryview(content)[place + 64 :])
    if seen.hexdigest() != header.sha256:
        raise _damaged("its checksum does not match")
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _damaged(f"its tensors can't be read ({type(error).__name__})") from error


def _seal_place(raw: bytes, digest: str) -> int:
    """Where the checksum's digits begin."""
    marked = f'"sha256":"{digest}"'.encode("utf-8", "replace")
    place = raw.find(marked)
    if place < 0 or raw.find(marked, place + 1) >= 0:
        raise _damaged("its checksum is not where kvfold puts it")
    return place + len(b'"sha256":"')


def _damaged(reason: str) -> SnapshotError:
    return SnapshotError(
        f"a snapshot must be a whole file as kvfold wrote it; {reason}; remove it, and make it anew"
    )
