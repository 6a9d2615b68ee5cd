"""From the engine's events to OpenAI's answers, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvfold.serving.request import Begun, CacheSize, Ended, Event, Held, Piece, TokenScore
from kvfold.serving.text import REPLACEMENT
from kvfold.serving.tool_calls import MadeCall, ToolCallFilter

LEAST_LOGPROB = -9999.0
"""Written for a token without any probability: JSON has no infinity."""


@dataclass
class Tally:
    """Tokens of one answer, of all its prompts and choices together."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def note(self, event: Event) -> None:
        """Count what an event tells."""
        if isinstance(event, Begun):
            self.cached += event.cached_tokens
        elif isinstance(event, Ended):
            self.generated += event.tokens

    def as_json(self) -> dict[str, Any]:
        """As `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass
class Gathered:
    """One choice, as far as it has come."""

    text: str = ""
    scores: list[TokenScore] = field(default_factory=list)
    reason: str | None = None
    size: CacheSize | None = None

    def note(self, event: Piece | Held | Ended) -> None:
        """Take in an event of this choice."""
        if isinstance(event, Piece):
            self.text += event.text
            self.scores += event.scores
        elif isinstance(event, Held):
            self.size = event.size
        else:
            self.reason = event.reason


class Form(ABC):
    """How one kind of completion is written. Choices are numbered through all prompts.

    tokenizer: for the texts of single tokens.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Gathered], tally: Tally) -> dict[str, Any]:
        """The answer in one piece."""
        made = [
            _with_size(self.choice(index, gathered), gathered.size)
            for index, gathered in enumerate(choices)
        ]
        return {
            **self.head,
            "object": self.whole_object,
            "choices": made,
            "usage": tally.as_json(),
        }

    def chunk(
        self, choices: Sequence[dict[str, Any]], tally: Tally | None = None
    ) -> dict[str, Any]:
        """One piece of a stream; with a tally the one that tells the usage."""
        made = {**self.head, "object": self.chunk_object, "choices": list(choices)}
        return made if tally is None else {**made, "usage": tally.as_json()}

    @abstractmethod
    def choice(self, index: int, gathered: Gathered) -> dict[str, Any]:
        """One choice of a whole answer."""

    @abstractmethod
    def opening(self, index: int) -> Iterable[dict[str, Any]]:
        """The choices of a stream's first pieces for one choice."""

    @abstractmethod
    def piece(self, index: int, event: Piece) -> Iterable[dict[str, Any]]:
        """Likewise for text that has come."""

    @abstractmethod
    def ending(self, index: int, event: Ended) -> Iterable[dict[str, Any]]:
        """Likewise for the end."""

    def held(self, index: int, event: Held) -> Iterable[dict[str, Any]]:
        """Likewise for what the cache takes."""
        return [_with_size(self.nothing(index), event.size)]

    @abstractmethod
    def nothing(self, index: int) -> dict[str, Any]:
        """A choice of a stream that brings no text."""

    def token_text(self, token: int) -> str:
        """The text of one token by itself."""
        text: str = self.tokenizer.decode([token])
        return text


class ChatForm(Form):
    """Chat completions. with_tools: look for tool calls in the text."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Any, *, with_tools: bool, scored: bool) -> None:
        super().__init__(model, tokenizer)
        self.with_tools = with_tools
        self.scored = scored
        self.filters: dict[int, ToolCallFilter] = {}
        self.calls: dict[int, int] = {}

    def choice(self, index: int, gathered: Gathered) -> dict[str, Any]:
        """See `Form`."""
        text, calls = gathered.text, []
        if self.with_tools:
            found = ToolCallFilter()
            parts = [*found.push(text), *found.flush()]
            calls = [part.as_json() for part in parts if isinstance(part, MadeCall)]
            text = "".join(part for part in parts if isinstance(part, str))
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text.strip() or None
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._scores(gathered.scores),
            "finish_reason": _reason(gathered.reason, bool(calls)),
        }

    def opening(self, index: int) -> Iterable[dict[str, Any]]:
        """See `Form`."""
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, event: Piece) -> Iterable[dict[str, Any]]:
        """See `Form`."""
        if not self.with_tools:
            return [self._delta(index, {"content": event.text}, event.scores)]
        parts = self.filters.setdefault(index, ToolCallFilter()).push(event.text)
        return self._parts(index, parts, event.scores)

    def ending(self, index: int, event: Ended) -> Iterable[dict[str, Any]]:
        """See `Form`."""
        rest = self.filters[index].flush() if index in self.filters else []
        made = list(self._parts(index, rest, ()))
        last = self._delta(index, {})
        last["finish_reason"] = _reason(event.reason, self.calls.get(index, 0) > 0)
        return [*made, last]

    def nothing(self, index: int) -> dict[str, Any]:
        """See `Form`."""
        return self._delta(index, {})

    def _parts(
        self, index: int, parts: Sequence[str | MadeCall], scores: Sequence[TokenScore]
    ) -> Iterable[dict[str, Any]]:
        """Text and calls; the scores go with the first of them, or by themselves."""
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                deltas.append({"content": part})
                continue
            number = self.calls.get(index, 0)
            self.calls[index] = number + 1
            deltas.append({"tool_calls": [{"index": number, **part.as_json()}]})
        if scores and not deltas:
            deltas.append({"content": ""})
        return [
            self._delta(index, delta, scores if place == 0 else ())
            for place, delta in enumerate(deltas)
        ]

    def _delta(
        self, index: int, delta: dict[str, Any], scores: Sequence[TokenScore] = ()
    ) -> dict[str, Any]:
        logprobs = self._scores(scores) if scores else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self.scored:
            return None
        content = [
            {
                **self._token(score.token, score.logprob),
                "top_logprobs": [self._token(*other) for other in score.top],
            }
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        whole = REPLACEMENT not in text
        return {
            "token": text,
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(text.encode()) if whole else None,
        }


class CompletionForm(Form):
    """Text completions. echoes: what to put before the answers, by choice."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, model: str, tokenizer: Any, *, echoes: Sequence[str], top: int | None
    ) -> None:
        super().__init__(model, tokenizer)
        self.echoes = echoes
        self.top = top

    def choice(self, index: int, gathered: Gathered) -> dict[str, Any]:
        """See `Form`."""
        return self._choice(
            index, self.echoes[index] + gathered.text, gathered.scores, gathered.reason
        )

    def opening(self, index: int) -> Iterable[dict[str, Any]]:
        """See `Form`."""
        echo = self.echoes[index]
        return [self._choice(index, echo)] if echo else []

    def piece(self, index: int, event: Piece) -> Iterable[dict[str, Any]]:
        """See `Form`."""
        return [self._choice(index, event.text, event.scores)]

    def ending(self, index: int, event: Ended) -> Iterable[dict[str, Any]]:
        """See `Form`."""
        return [self._choice(index, "", reason=event.reason)]

    def nothing(self, index: int) -> dict[str, Any]:
        """See `Form`."""
        return self._choice(index, "")

    def _choice(
        self,
        index: int,
        text: str,
        scores: Sequence[TokenScore] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = None if self.top is None else self._scores(scores)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        likeliest = [
            {self.token_text(token): max(logprob, LEAST_LOGPROB) for token, logprob in score.top}
            for score in scores
        ]
        return {
            "tokens": [self.token_text(score.token) for score in scores],
            "token_logprobs": [max(score.logprob, LEAST_LOGPROB) for score in scores],
            "top_logprobs": likeliest if self.top else None,
            "text_offset": [score.offset for score in scores],
        }


def _reason(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


def _with_size(choice: dict[str, Any], size: CacheSize | None) -> dict[str, Any]:
    """Only where it was asked for, so that OpenAI's shape is kept for all who don't."""
    return choice if size is None else {**choice, "kvfold_cache": asdict(size)}
