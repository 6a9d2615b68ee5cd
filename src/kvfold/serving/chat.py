"""From messages to tokens by the model's own chat template, which also says what it can't take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from kvfold.errors import RequestError
from kvfold.serving.schema import Message, Tool

FAILURES = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""What a template raises on messages that it is not made for."""


def template_of(tokenizer: Any) -> str:
    """The chat template, "" where there is none; of several, all of their text."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return found if isinstance(found, str) else "\n".join(found.values())


def chat_tokens(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool] | None
) -> list[int]:
    """Token ids of a conversation, ready for the answer.

    Raises `RequestError` where the model has no template, or one that knows no tools while some
    are given, or one that refuses these messages.
    """
    template = template_of(tokenizer)
    if not template:
        raise RequestError(
            "this model has no chat template, so it can't take messages; use /v1/completions",
            param="messages",
        )
    if tools and "tools" not in template:
        raise RequestError(
            "this model's chat template has no place for tools; leave them out", param="tools"
        )
    plain = [_plain(message) for message in messages]
    given = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None
    for number, message in enumerate(plain):
        check_unicode(message, f"message {number}", "messages")
    check_unicode(given, "a tool", "tools")
    try:
        made = tokenizer.apply_chat_template(
            plain, tools=given, add_generation_prompt=True, return_dict=True
        )
    except FAILURES as error:
        raise RequestError(
            f"this model's chat template does not take these messages: {error}", param="messages"
        ) from error
    tokens: list[int] = list(made["input_ids"])
    if not tokens:
        raise RequestError("these messages make no tokens at all", param="messages")
    return tokens


def check_unicode(given: Any, what: str, param: str) -> None:
    """Raise `RequestError` for text that no tokenizer takes: JSON can write half a character.

    given: text, or plain data that holds some. what: its name in the message.
    """
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} must be Unicode text; got half of a surrogate pair, "
            f"\\u{ord(error.object[error.start]):04x}; send both halves, or the character itself",
            param=param,
        ) from None


def _plain(message: Message) -> dict[str, Any]:
    """As templates expect messages: text in one piece, arguments as a mapping."""
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if isinstance(message.content, list):
        made["content"] = "".join(part.text for part in message.content)
    else:
        made["content"] = message.content or ""
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return made


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RequestError(
            f"the arguments of a tool call must be a JSON object; got {text[:100]!r}",
            param="messages",
        )
    return found
