"""Tool calls in the text of an answer, in the two ways that models write them.

Both stand between `<tool_call>` and `</tool_call>`: JSON with `name` and `arguments` (one object or
a list of them), or `<function=NAME><parameter=KEY>VALUE</parameter></function>`. Text that is
neither is passed on as text. Models that write calls in another way answer with text.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

from kvfold.serving.text import overlap

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


@dataclass(frozen=True)
class MadeCall:
    """A call that the model made. arguments: JSON text."""

    name: str
    arguments: str
    id: str

    def as_json(self) -> dict[str, Any]:
        """As it stands in a message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallFilter:
    """Takes calls out of text that comes in pieces. A call is told once it is complete."""

    def __init__(self) -> None:
        self.held = ""
        self.inside = False

    def push(self, text: str) -> list[str | MadeCall]:
        """Take text; returns text and calls in order."""
        self.held += text
        made: list[str | MadeCall] = []
        while True:
            border = CLOSING if self.inside else OPENING
            before, found, after = self.held.partition(border)
            if not found:
                break
            made += parse_calls(before) if self.inside else [before]
            self.held, self.inside = after, not self.inside
        if not self.inside:
            kept = overlap(self.held, OPENING)
            made.append(self.held[: len(self.held) - kept])
            self.held = self.held[len(self.held) - kept :]
        return [part for part in made if part]

    def flush(self) -> list[str | MadeCall]:
        """What was held back, at the end: a call may lack its closing tag."""
        rest, self.held = self.held, ""
        if not self.inside:
            return [rest] if rest else []
        self.inside = False
        calls = parse_calls(rest)
        if any(isinstance(part, str) for part in calls):
            return [OPENING + rest]
        return calls


def parse_calls(text: str) -> list[str | MadeCall]:
    """Calls written between the tags; the text with its tags where it is none."""
    functions = list(FUNCTION.finditer(text))
    if functions:
        return [_of_function(found) for found in functions]
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    calls = read if isinstance(read, list) else [read]
    if calls and all(
        isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls
    ):
        return [_of_json(call) for call in calls]
    return [f"{OPENING}{text}{CLOSING}"]


def _of_json(call: dict[str, Any]) -> MadeCall:
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return MadeCall(call["name"], text, _new_id())


def _of_function(found: re.Match[str]) -> MadeCall:
    arguments = {name: _value(text.strip("\n")) for name, text in PARAMETER.findall(found[2])}
    return MadeCall(found[1], json.dumps(arguments, ensure_ascii=False), _new_id())


def _value(text: str) -> Any:
    """Numbers, lists and the like are written as JSON, strings as they are."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
