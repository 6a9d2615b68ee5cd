"""Which peers there are, as the command line names them.

    snapkv@4x             SnapKV, a quarter of a prompt's tokens kept
    snapkv=my-addon       SnapKV, as many bytes as the subject my-addon keeps of the same prompt
    quantized-4bit        transformers' own quantised cache (by optimum-quanto)
    plain, plain-bf16     the model itself in the peers' environment, nothing compressed

SnapKV (arXiv 2404.14469), Expected Attention (arXiv 2510.00636), KVzip (arXiv 2505.23416) and
StreamingLLM (arXiv 2309.17453) are kvpress', with its own settings. SnapKV alone gets another one
where it must: it always keeps the window that it looks through, 64 tokens, and would keep nothing
else, not even the first token, where it may keep no more than that. There the window is half of
what it may keep.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from kvfold.errors import EvaluationError

PRESSES = ("snapkv", "expected-attention", "kvzip", "streaming-llm")
"""kvpress' methods."""

DTYPES = MappingProxyType({"bf16": "bfloat16", "fp32": "float32"})
BITS = (2, 4)
"""What optimum-quanto has for caches."""

NAMES = "snapkv@4x, snapkv=SUBJECT, quantized-4bit, quantized-2bit, plain, plain-bf16, plain-fp32"
_PRESS = re.compile(rf"(?P<method>{'|'.join(PRESSES)})(?:@(?P<times>\d+(?:\.\d+)?)x|=(?P<like>.+))")
_QUANTIZED = re.compile(rf"quantized-(?P<bits>{'|'.join(map(str, BITS))})bit")
_PLAIN = re.compile(rf"plain(?:-(?P<dtype>{'|'.join(DTYPES)}))?")


@dataclass(frozen=True)
class PeerSpec:
    """One peer. name: as it was written.

    method: of kvpress, `quantized` or `plain`. times_smaller: of a prompt's tokens, or like: the
    subject whose bytes it may take; both None for other methods. bits: of quantised values. dtype:
    None for the run's own.
    """

    name: str
    method: str
    times_smaller: float | None = None
    like: str | None = None
    bits: int | None = None
    dtype: str | None = None

    @property
    def drops_tokens(self) -> bool:
        """Whether it keeps some tokens of a context and none of the others."""
        return self.method in PRESSES

    def to_dict(self) -> dict[str, Any]:
        """Plain data without its name."""
        return {key: value for key, value in asdict(self).items() if key != "name"}


def parse_peers(text: str) -> tuple[PeerSpec, ...]:
    """Peers from `snapkv@4x,quantized-4bit`; raises `EvaluationError` saying what can be named."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise EvaluationError(f"at least one peer must be named, such as {NAMES}; got none")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EvaluationError(f"each peer is asked once; got {', '.join(twice)} more than once")
    return tuple(_peer(name) for name in names)


def check_likes(peers: Sequence[PeerSpec], subjects: Sequence[str]) -> None:
    """Raise `EvaluationError` for a peer that is to be like a subject that isn't there."""
    for peer in peers:
        if peer.like is not None and peer.like not in subjects:
            known = ", ".join(subjects) or "no add-on"
            raise EvaluationError(
                f"{peer.name} may take the bytes of one of the run's add-ons; this run has "
                f"{known}; name one of those, or a size such as {peer.method}@4x"
            )


def _peer(name: str) -> PeerSpec:
    if match := _PRESS.fullmatch(name):
        times = None if match["times"] is None else float(match["times"])
        if times is not None and times < 1:
            raise EvaluationError(
                f"a cache is at least 1x smaller; got {name!r}; {match['method']}@4x keeps a "
                "quarter of the tokens"
            )
        return PeerSpec(name, match["method"], times_smaller=times, like=match["like"])
    if match := _QUANTIZED.fullmatch(name):
        return PeerSpec(name, "quantized", bits=int(match["bits"]))
    if match := _PLAIN.fullmatch(name):
        return PeerSpec(name, "plain", dtype=match["dtype"] and DTYPES[match["dtype"]])
    raise EvaluationError(
        f"a peer is named as in {NAMES}, of the methods {', '.join(PRESSES)}; got {name!r}; "
        "a size is how many times smaller the cache gets"
    )
