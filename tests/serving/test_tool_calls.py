"""Calls are taken out of text in both ways that models write them; other text is left alone."""

from __future__ import annotations

import json

import pytest

from kvfold.serving.tool_calls import MadeCall, ToolCallFilter

ONE = '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2], "b": "x"}}\n</tool_call>'
LIST = '<tool_call>[{"name": "add", "arguments": {}}, {"name": "sub", "arguments": {}}]</tool_call>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n[1, 2]\n</parameter>\n"
    "<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>"
)


def parts(text: str, size: int) -> list[str | MadeCall]:
    """What comes of a text in pieces of some size, with texts joined."""
    found = ToolCallFilter()
    made = [p for at in range(0, len(text), size) for p in found.push(text[at : at + size])]
    joined: list[str | MadeCall] = []
    for part in made + found.flush():
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("call", [ONE, XML, ONE.removesuffix("</tool_call>")])
def test_a_call_is_found_however_the_text_comes(call: str, size: int) -> None:
    before, made = parts(f"a < b. {call}", size)
    assert before == "a < b. "
    assert isinstance(made, MadeCall)
    assert made.name == "add"
    assert json.loads(made.arguments) == {"a": [1, 2], "b": "x"}


def test_several_calls_have_ids_of_their_own() -> None:
    made = parts(LIST + ONE, 5)
    assert [part.name for part in made if isinstance(part, MadeCall)] == ["add", "sub", "add"]
    assert len({part.id for part in made if isinstance(part, MadeCall)}) == 3


@pytest.mark.parametrize(
    "text",
    ["no call", "<tool", "<tool_call>not JSON</tool_call> more", "<tool_call>{", "<tool_call>[3]"],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parts(text, 3) == [text]
