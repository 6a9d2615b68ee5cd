"""From what a client has sent to what the engine is asked for; refuses what can't be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.errors import RequestError
from kvfold.serving.chat import chat_tokens, check_unicode
from kvfold.serving.lane import Lane
from kvfold.serving.request import Request, Sampling
from kvfold.serving.schema import MOST_TOKENS, ChatRequest, Common, CompletionRequest

DEFAULT_COMPLETION_TOKENS = 16
"""Of `/v1/completions`, as OpenAI has it."""


@dataclass(frozen=True)
class Limits:
    """max_tokens: the longest answer, and a chat's where it names no length. max_prompts: of one
    text completion."""

    max_tokens: int = 4096
    max_prompts: int = 64


@dataclass(frozen=True)
class Asked:
    """requests: one for each prompt. echoes: what to put before each one's answers."""

    requests: tuple[Request, ...]
    echoes: tuple[str, ...]


def ask_chat(lane: Lane, wanted: ChatRequest, limits: Limits) -> Asked:
    """The engine's request for a chat completion; raises `RequestError`."""
    _refuse_chat(wanted)
    tools = None if wanted.tool_choice == "none" else wanted.tools
    tokens = chat_tokens(lane.tokenizer, wanted.messages, tools)
    asked_for = wanted.max_completion_tokens or wanted.max_tokens
    top = (wanted.top_logprobs or 0) if wanted.logprobs else None
    length = _length(lane, tokens, asked_for, limits, "messages")
    return Asked((_request(lane, wanted, tokens, length, top, "messages"),), ("",))


def _refuse_chat(wanted: ChatRequest) -> None:
    if wanted.top_logprobs is not None and not wanted.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    kind = (wanted.response_format or {"type": "text"}).get("type")
    if kind != "text":
        raise RequestError(
            f"response_format must be text, since answers can't be held to a form; got {kind!r}",
            param="response_format",
        )
    if wanted.tool_choice not in (None, "none", "auto"):
        raise RequestError(
            "tool_choice must be 'auto' or 'none', since a model can't be made to call a tool; "
            f"got {str(wanted.tool_choice)[:100]!r}",
            param="tool_choice",
        )


def ask_completion(lane: Lane, wanted: CompletionRequest, limits: Limits) -> Asked:
    """The engine's requests for a text completion; raises `RequestError`."""
    _refuse_completion(wanted)
    prompts = _prompts(lane.tokenizer, wanted)
    if len(prompts) > limits.max_prompts:
        raise RequestError(
            f"at most {limits.max_prompts} prompts may come at once; got {len(prompts)}",
            param="prompt",
        )
    asked_for = wanted.max_tokens or DEFAULT_COMPLETION_TOKENS
    requests = []
    for tokens, _ in prompts:
        length = _length(lane, tokens, asked_for, limits, "prompt")
        requests.append(_request(lane, wanted, tokens, length, wanted.logprobs, "prompt"))
    return Asked(tuple(requests), tuple(text if wanted.echo else "" for _, text in prompts))


def _refuse_completion(wanted: CompletionRequest) -> None:
    if wanted.echo and wanted.logprobs is not None:
        raise RequestError(
            "echo with logprobs asks for the log probabilities of the prompt, which are not there: "
            "a prompt is read without logits but its last token's, and where it skips layers none "
            "could be had; leave echo or logprobs out",
            param="echo",
        )
    if wanted.suffix is not None:
        raise RequestError("suffix is not supported; leave it out", param="suffix")
    if wanted.best_of is not None and wanted.best_of != (wanted.n or 1):
        raise RequestError(
            f"best_of must be n or left out, since every choice is returned; got {wanted.best_of}",
            param="best_of",
        )


def _prompts(tokenizer: Any, wanted: CompletionRequest) -> list[tuple[list[int], str]]:
    """Tokens and text of each prompt."""
    given = wanted.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    several: Sequence[Any] = [given] if is_one else given
    made = []
    for number, prompt in enumerate(several):
        if isinstance(prompt, str):
            check_unicode(prompt, "the prompt" if is_one else f"prompt {number}", "prompt")
            tokens = list(tokenizer(prompt)["input_ids"])
            if not tokens and isinstance(tokenizer.bos_token_id, int):
                tokens = [tokenizer.bos_token_id]
            text = prompt
        else:
            tokens = list(prompt)
            text = tokenizer.decode(tokens, skip_special_tokens=True) if wanted.echo else ""
        if not tokens:
            raise RequestError("a prompt must have at least one token", param="prompt")
        made.append((tokens, text))
    return made


def _length(
    lane: Lane, tokens: Sequence[int], asked_for: int | None, limits: Limits, source: str
) -> int:
    """How many tokens an answer may have; what is left where none is asked for.

    source: the part of the request that the prompt's tokens came from, for errors.
    """
    left = lane.context - len(tokens)
    if left < 1:
        raise RequestError(
            f"this model takes {lane.context} tokens, prompt and answer together; the prompt alone "
            f"has {len(tokens)}; shorten it",
            param=source,
            code="context_length_exceeded",
        )
    if asked_for is None:
        return min(left, limits.max_tokens)
    if asked_for > limits.max_tokens:
        raise RequestError(
            f"this server gives answers of at most {limits.max_tokens} tokens; got "
            f"max_tokens={asked_for}",
            param="max_tokens",
        )
    return asked_for


def _request(
    lane: Lane, wanted: Common, tokens: Sequence[int], length: int, top: int | None, source: str
) -> Request:
    stop = [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop or []
    made = Request(
        wanted.model,
        tuple(tokens),
        length,
        wanted.n or 1,
        tuple(stop),
        Sampling(
            1.0 if wanted.temperature is None else wanted.temperature,
            1.0 if wanted.top_p is None else wanted.top_p,
            wanted.seed,
            wanted.presence_penalty or 0.0,
            wanted.frequency_penalty or 0.0,
            _bias(wanted.logit_bias or {}, lane.anatomy.vocab_size),
        ),
        top,
        bool(wanted.kvfold_cache),
    )
    lane.check(made, source)
    return made


def _bias(given: dict[str, float], vocabulary: int) -> dict[int, float]:
    if not all(_is_token(name, vocabulary) for name in given):
        raise RequestError(
            f"the keys of logit_bias are token ids from 0 to {vocabulary - 1}", param="logit_bias"
        )
    return {int(name): bias for name, bias in given.items()}


def _is_token(name: str, vocabulary: int) -> bool:
    """The length is looked at first: Python refuses to read numbers of thousands of digits."""
    return (
        name.isascii()
        and name.isdigit()
        and len(name) <= len(str(MOST_TOKENS))
        and int(name) < vocabulary
    )
