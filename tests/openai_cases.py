"""What OpenAI's own client must get of any server here: kvfold's, and vLLM's with its plugin.

Names of models: `plain` and `ced` say anything, `unicode` and `call` what is in `SCRIPTS`. A
fixture `client` asks the server, and `asked(name)` gives the messages of a chat that makes the
model of that name say its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import openai
import pytest

CALL = '{"name": "add", "arguments": {"a": 2, "b": "é"}}'
SCRIPTS = {"unicode": "aé世!", "call": "So: <tool_call>" + CALL + "</tool_call>"}
CALL_TOKENS = ("<tool_call>", CALL, "</tool_call>")
"""One token each, since a script must not repeat any."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

Asked = Callable[[str], list[dict[str, Any]]]


def successors(tokenizer: Any, start: str, script: str) -> list[tuple[int, int]]:
    """Each token of a script with the one that follows it, from a start token to the end token."""
    tokens = tokenizer(start + script)["input_ids"] + [tokenizer.eos_token_id]
    assert len(set(tokens)) == len(tokens), "every token must have one successor"
    return list(pairwise(tokens))


def said(stream: Any) -> tuple[str, list[Any]]:
    """The text of a streamed chat, and its chunks."""
    chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices), chunks


class OpenAICases:
    """To be inherited by a test class beside the fixtures."""

    @pytest.mark.parametrize("model", ["plain", "ced"])
    def test_a_streamed_chat_is_the_whole_chat_in_pieces(
        self, client: Any, asked: Asked, model: str
    ) -> None:
        keys = {"model": model, "messages": asked(model), "temperature": 0, "max_tokens": 9}
        whole = client.chat.completions.create(**keys)
        text, chunks = said(
            client.chat.completions.create(
                **keys, stream=True, stream_options={"include_usage": True}
            )
        )
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
        assert chunks[-1].usage == whole.usage
        assert whole.usage.completion_tokens == 9
        assert whole.usage.prompt_tokens == len(asked(model)[0]["content"]) + 2

    def test_characters_split_over_tokens_come_whole(self, client: Any, asked: Asked) -> None:
        stream = client.chat.completions.create(
            model="unicode", messages=asked("unicode"), stream=True
        )
        pieces = [choice.delta.content for chunk in stream for choice in chunk.choices]
        assert [piece for piece in pieces if piece] == ["a", "é", "世", "!"]

    def test_the_end_token_ends_an_answer(self, client: Any, asked: Asked) -> None:
        made = client.chat.completions.create(model="unicode", messages=asked("unicode"))
        assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("aé世!", "stop")
        assert made.usage.completion_tokens == len("aé世!".encode()) + 1

    @pytest.mark.parametrize(("stop", "left"), [("世!", "aé"), (["x", "é"], "a"), ("!?", "aé世!")])
    def test_a_stop_text_across_tokens_is_left_out(
        self, client: Any, asked: Asked, stop: Any, left: str
    ) -> None:
        keys = {"model": "unicode", "messages": asked("unicode"), "stop": stop, "logprobs": True}
        whole = client.chat.completions.create(**keys)
        text, _ = said(client.chat.completions.create(**keys, stream=True))
        assert text == whole.choices[0].message.content == left
        assert whole.choices[0].finish_reason == "stop"
        assert len(whole.choices[0].logprobs.content) >= len(left.encode())
        assert whole.choices[0].logprobs.content[0].token == "a"

    def test_tool_calls_are_found_in_the_text(self, client: Any, asked: Asked) -> None:
        keys = {"model": "call", "messages": asked("call"), "tools": TOOLS}
        whole = client.chat.completions.create(**keys).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content.strip() == "So:"
        call = whole.message.tool_calls[0].function
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": "é"})
        text, chunks = said(client.chat.completions.create(**keys, stream=True))
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        calls = [call.function for delta in deltas for call in delta.tool_calls or []]
        assert text.strip() == "So:"
        assert [call.name for call in calls if call.name] == ["add"]
        written = "".join(call.arguments or "" for call in calls)
        assert json.loads(written) == {"a": 2, "b": "é"}
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    def test_without_tools_the_text_of_a_call_is_text(self, client: Any, asked: Asked) -> None:
        keys = {"model": "call", "messages": asked("call")}
        plain = client.chat.completions.create(**keys).choices[0]
        refused = client.chat.completions.create(**keys, tools=TOOLS, tool_choice="none").choices[0]
        assert plain.message.content == refused.message.content
        assert "<tool_call>" in plain.message.content
        assert not plain.message.tool_calls

    def test_a_conversation_with_calls_goes_back_in(self, client: Any, asked: Asked) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            *asked("unicode"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ]
        made = client.chat.completions.create(model="unicode", messages=messages, tools=TOOLS)
        assert made.choices[0].message.content == "aé世!"

    def test_choices_and_log_probabilities(self, client: Any, asked: Asked) -> None:
        keys = {
            "model": "ced", "messages": asked("ced"), "max_tokens": 4, "seed": 3,
            "temperature": 1.5,
        }  # fmt: skip
        made = client.chat.completions.create(**keys, n=3, logprobs=True, top_logprobs=2)
        again = client.chat.completions.create(**keys, n=3)
        texts = [choice.message.content for choice in made.choices]
        assert texts == [choice.message.content for choice in again.choices]
        assert len(set(texts)) > 1
        for choice in made.choices:
            assert len(choice.logprobs.content) == 4
            for score in choice.logprobs.content:
                assert len(score.top_logprobs) == 2
                assert score.logprob <= score.top_logprobs[0].logprob <= 0
        assert made.usage.completion_tokens == 12
        _, chunks = said(client.chat.completions.create(**keys, n=3, stream=True))
        assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2}

    def test_text_completions(self, client: Any) -> None:
        keys = {"model": "plain", "prompt": ["ab", "abc"], "max_tokens": 5, "temperature": 0}
        whole = client.completions.create(**keys, logprobs=1)
        assert [choice.index for choice in whole.choices] == [0, 1]
        assert whole.usage.prompt_tokens == 5
        assert whole.usage.completion_tokens == 10
        for choice in whole.choices:
            scores = choice.logprobs
            assert len(scores.tokens) == len(scores.token_logprobs) == 5
            assert scores.text_offset[0] == 0
            assert scores.text_offset == sorted(scores.text_offset)
        pieces = ["", ""]
        for chunk in client.completions.create(**keys, stream=True):
            pieces[chunk.choices[0].index] += chunk.choices[0].text
        assert pieces == [choice.text for choice in whole.choices]

    def test_a_prompt_may_be_tokens_and_may_be_echoed(
        self, client: Any, byte_tokenizer: Any
    ) -> None:
        ids = byte_tokenizer("ab")["input_ids"]
        keys = {"model": "plain", "max_tokens": 3, "temperature": 0, "echo": True}
        of_text = client.completions.create(**keys, prompt="ab").choices[0].text
        of_tokens = client.completions.create(**keys, prompt=ids).choices[0].text
        of_list = client.completions.create(**keys, prompt=[ids, ids]).choices
        assert of_text == of_tokens
        assert of_text.startswith("ab")
        assert [choice.text for choice in of_list] == [of_text] * 2
        streamed = client.completions.create(**keys, prompt="ab", stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == of_text

    @pytest.mark.parametrize("streamed", [False, True])
    def test_concurrent_clients_get_what_they_would_get_alone(
        self, client: Any, streamed: bool
    ) -> None:
        """16 of different lengths, streaming or not."""

        def ask(number: int) -> str:
            keys = {
                "model": "ced", "prompt": "abcdefgh" * (1 + number % 5), "temperature": 0,
                "max_tokens": 2 + number % 4,
            }  # fmt: skip
            if not streamed:
                return str(client.completions.create(**keys).choices[0].text)
            stream = client.completions.create(**keys, stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

        alone = [ask(number) for number in range(16)]
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(ask, range(16))) == alone

    @pytest.mark.parametrize(
        ("keys", "error"),
        [
            ({"model": "other"}, openai.NotFoundError),
            ({"max_tokens": 600}, openai.BadRequestError),
            ({"messages": [{"role": "user", "content": "x" * 600}]}, openai.BadRequestError),
            ({"temperature": -1}, openai.BadRequestError),
            ({"top_logprobs": 2}, openai.BadRequestError),
            ({"stop": 3}, openai.BadRequestError),
            ({"n": 0}, openai.BadRequestError),
        ],
        ids=["model", "max_tokens", "prompt", "temperature", "top_logprobs", "stop", "n"],
    )
    def test_what_cannot_hold_is_the_clients_fault(
        self, client: Any, asked: Asked, keys: dict[str, Any], error: type[openai.APIStatusError]
    ) -> None:
        with pytest.raises(error):
            client.chat.completions.create(**{"model": "ced", "messages": asked("ced"), **keys})

    def test_token_ids_that_no_token_has_are_the_clients_fault(self, client: Any) -> None:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="ced", prompt=[[9999]])

    def test_a_template_that_refuses_says_why(self, client: Any) -> None:
        messages = [{"role": "user", "content": "fail"}]
        with pytest.raises(openai.BadRequestError, match="no such talk"):
            client.chat.completions.create(model="unicode", messages=messages)
