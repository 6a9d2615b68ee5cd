"""What the engine is asked for, and what it answers with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvfold.errors import RequestError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 takes the likeliest. top_p: only the likeliest tokens that have so much
    probability together. seed: None for one that nobody knows. presence_penalty and
    frequency_penalty: taken from the logits of tokens that were generated, once and per time.
    logit_bias: added to the logits of some tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One prompt and how it is to be continued.

    model: the name of a lane. tokens: of the prompt, at least one. choices: how many
    continuations, each with its own seed. stop: texts that end a continuation and are left out of
    it. top_logprobs: how many alternatives to report beside each token's own logprob; None
    reports nothing. tell_cache: whether to tell what each choice's cache takes.
    """

    model: str
    tokens: tuple[int, ...]
    max_tokens: int
    choices: int = 1
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    top_logprobs: int | None = None
    tell_cache: bool = False

    def __post_init__(self) -> None:
        if not self.tokens:
            raise RequestError("a prompt must have at least one token; got none")
        if self.max_tokens < 1 or self.choices < 1:
            raise RequestError(
                "max_tokens and the number of choices must be at least 1; got "
                f"{self.max_tokens} and {self.choices}"
            )
        if "" in self.stop:
            raise RequestError("a stop text must not be empty")


@dataclass(frozen=True)
class TokenScore:
    """A generated token: its log probability under the model, before any sampling option.

    top: the likeliest tokens with theirs. offset: where its text begins in the choice's text.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Begun:
    """The prompt has been read, so many tokens of it from a store."""

    cached_tokens: int


@dataclass(frozen=True)
class Piece:
    """Text that has come to a choice; `scores` of the tokens since the last piece, if asked for."""

    choice: int
    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class CacheSize:
    """What one row's cache takes at one moment.

    tokens: that it has seen. bytes: of its real storages; of a cache that `rows` rows share, this
    row's part, which has room for as many tokens as the longest of them has. parts: the same
    bytes, by component (see `kvfold.runtime.ledger`). plain_bytes: what the plain model's cache
    would hold of the same tokens.
    """

    tokens: int
    bytes: int
    plain_bytes: int
    parts: Mapping[str, int]
    rows: int
    longest: int


@dataclass(frozen=True)
class Held:
    """What a choice's cache takes now; told at the beginning, now and then, and before the end."""

    choice: int
    size: CacheSize


@dataclass(frozen=True)
class Ended:
    """A choice is complete, after so many generated tokens."""

    choice: int
    reason: FinishReason
    tokens: int


@dataclass(frozen=True)
class Failed:
    """The whole request has come to nothing."""

    error: Exception


Event = Begun | Piece | Held | Ended | Failed
Sink = Callable[[Event], None]
"""Called in the engine's thread; must return at once and not raise."""


class Ticket:
    """A request that was handed to the engine."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.cancelled = False
