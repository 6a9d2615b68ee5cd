"""From the texts that a recipe names to a mixture of their rows, and held-out rows beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.errors import CorpusError
from kvfold.fitting.corpus import DEFAULT_CORPUS, HUB_PREFIX, check_window, hub_source
from kvfold.fitting.mixture import Mixture, MixturePart, apportion
from kvfold.fitting.packing import Documents, load_documents, packed_windows, texts_of, without
from kvfold.fitting.self_text import self_generated
from kvfold.fitting.workers import ALONE, Workers

SELF = "self"
"""The source that is the model's own text. A file or folder of this name is `./self`."""


@dataclass(frozen=True)
class TextPart:
    """One text of a mixture, as a recipe names it.

    source: None for the default corpus, a path, `hub:NAME` (see `kvfold.fitting.corpus`), or
    `self` for what the model itself writes. weight: its share of the rows beside the other parts'.
    tokens: to train on, at most; all there are if None, which `self` can't have. Raises
    `CorpusError` for a weight that is not above 0 and finite, for no tokens, or for a NAME that is
    none of the hub's.
    """

    source: str | Path | None = None
    weight: float = 1.0
    tokens: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise CorpusError(
                f"a text's weight must be above 0 and finite; {self.name} has {self.weight}; leave "
                "it out if it is to give nothing"
            )
        if self.name.startswith(HUB_PREFIX):
            hub_source(self.name)
        if self.tokens is not None and self.tokens < 1:
            raise CorpusError(f"a text's tokens must be at least 1; {self.name} has {self.tokens}")
        if self.is_self and self.tokens is None:
            raise CorpusError(
                "the model's own text has no end; say how many tokens of it are wanted"
            )

    @property
    def name(self) -> str:
        """What the part is called in a mixture and in messages."""
        return DEFAULT_CORPUS if self.source is None else str(self.source)

    @property
    def is_self(self) -> bool:
        """Whether the model writes this text."""
        return self.source == SELF


class TrainingText(NamedTuple):
    """What to train on, and (windows, window) int64 to check on, of all parts, in their order."""

    mixture: Mixture
    held_out: Tensor


def build_mixture(
    parts: Sequence[TextPart],
    model: Any,
    tokenizer: Any,
    *,
    window: int,
    seed: int,
    held_out_tokens: int,
    temperature: float = 1.0,
    top_p: float | None = None,
    prompts: Sequence[str] | None = None,
    batch: int = 8,
    file: str | Path | None = None,
    progress: bool = False,
    workers: Workers = ALONE,
) -> TrainingText:
    """Read or write the texts of a recipe, and cut them into rows.

    parts: of sources that hold no text in common. model: plain; asked only for `self` text.
    held_out_tokens: at most so many, at least a window of each part; parts give of them by their
    weights, so that a part with little held-out text lowers the number of all. No held-out
    document is trained on, in whatever part it stands. temperature to workers: of `self` text,
    see `self_generated`; its first rows are the held-out ones, so that more tokens move none.

    Raises `CorpusError` for no parts, for sources one of which is in another, for a text that is
    too short, and as `load_documents`, `self_generated` and `Mixture` do.
    """
    _check_sources(parts)
    check_window(window, held_out_tokens)
    documents = _documents(parts, tokenizer)

    write = partial(
        self_generated,
        model,
        tokenizer,
        window=window,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        prompts=prompts,
        batch=batch,
        file=file,
        progress=progress,
        workers=workers,
    )
    pack = partial(_packed, tokenizer, window)
    held_out = {
        name: pack(f"held-out part of {name}", texts.held_out, held_out_tokens)
        for name, texts in documents.items()
    }
    available = {name: len(windows) for name, windows in held_out.items()}
    shares = _held_out_shares(parts, available, held_out_tokens // window)
    made, checked = [], []
    for part, share in zip(parts, shares, strict=True):
        if part.is_self:
            train, kept = _split_written(part, share, window, write)
        else:
            train = pack(part.name, documents[part.name].train, part.tokens)
            kept = held_out[part.name][:share]
        made.append(MixturePart(part.name, train, part.weight))
        checked.append(kept)
    return TrainingText(Mixture(made, seed), torch.cat(checked))


def _packed(
    tokenizer: Any, window: int, name: str, texts: Sequence[str], tokens: int | None
) -> Tensor:
    """`packed_windows`, with the text's name in the error."""
    try:
        return packed_windows(texts, tokenizer, window=window, tokens=tokens)
    except CorpusError as error:
        raise CorpusError(f"{name}: {error}") from None


def _check_sources(parts: Sequence[TextPart]) -> None:
    """Raise `CorpusError` where two parts are, or one holds, the same text."""
    if not parts:
        raise CorpusError("a mixture must have at least one part; got none; name a text")
    seen: list[tuple[str, Path | None]] = []
    for part in parts:
        is_path = not (part.source is None or part.is_self or part.name.startswith(HUB_PREFIX))
        path = Path(part.name).resolve() if is_path else None
        for name, other in seen:
            if name == part.name or (path and other and _is_within(path, other)):
                raise CorpusError(
                    f"the parts of a mixture must be different texts; {part.name} and {name} are, "
                    "or hold, the same; name it once, with the sum of their weights"
                )
        seen.append((part.name, path))


def _is_within(one: Path, other: Path) -> bool:
    """Whether a path is the other, or in it, or the other in the one."""
    return one.is_relative_to(other) or other.is_relative_to(one)


def _documents(parts: Sequence[TextPart], tokenizer: Any) -> dict[str, Documents]:
    """The documents of all parts but `self`; none to train on is held out in any part."""
    read = {part.name: load_documents(part.source, tokenizer) for part in parts if not part.is_self}
    held_out = {text for documents in read.values() for text in texts_of(documents.held_out)}
    return {name: without(documents, held_out) for name, documents in read.items()}


def _held_out_shares(
    parts: Sequence[TextPart], available: Mapping[str, int], rows: int
) -> list[int]:
    """Held-out rows of each part by weight, fewer in all where a part does not have its share.

    available: how many a part has, by name, if there is an end to them.
    """
    weights = [Fraction(str(float(part.weight))) for part in parts]
    if rows < len(parts):
        raise CorpusError(
            f"each of {len(parts)} parts must have a held-out window; held_out_tokens is enough "
            f"for {rows}; raise it, or lower the window"
        )
    whole = sum(weights, Fraction(0))
    ends = [
        math.ceil((available[part.name] + 1) * whole / weight)
        for part, weight in zip(parts, weights, strict=True)
        if part.name in available
    ]
    most = min([rows, *ends])
    for total in range(most, len(parts), -1):
        shares = apportion(weights, total)
        pairs = zip(parts, shares, strict=True)
        if all(share <= available.get(part.name, share) for part, share in pairs):
            return shares
    return [1] * len(parts)


def _split_written(
    part: TextPart, share: int, window: int, write: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Rows that the model writes: to train on, none of them like a held-out one, and held out."""
    assert part.tokens is not None
    check_window(window, part.tokens)
    rows = write(tokens=(part.tokens // window + share) * window)
    kept, train = rows[:share], rows[share:]
    known = {tuple(row) for row in kept.tolist()}
    new = [number for number, row in enumerate(train.tolist()) if tuple(row) not in known]
    if not new:
        raise CorpusError(
            "the model's own text must have rows that are not all alike; it writes "
            f"{len(rows)} times the same; raise the temperature or top_p, or name prompts"
        )
    return train[new], kept
