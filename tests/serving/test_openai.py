"""OpenAI's own client is served by a live server as by theirs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

ASKED = [{"role": "user", "content": "Tell me."}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def said(stream: Any) -> tuple[str, list[Any]]:
    chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices), chunks


def test_models_are_listed_and_found(client: Any) -> None:
    assert [model.id for model in client.models.list()][:2] == ["plain", "ced"]
    assert client.models.retrieve("ced").id == "ced"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("model", ["plain", "ced"])
def test_a_streamed_chat_is_the_whole_chat_in_pieces(client: Any, model: str) -> None:
    asked = {"model": model, "messages": ASKED, "temperature": 0, "max_tokens": 9}
    whole = client.chat.completions.create(**asked)
    text, chunks = said(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 9
    assert whole.usage.prompt_tokens == len("Tell me.") + 2
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


def test_characters_split_over_tokens_come_whole(client: Any) -> None:
    stream = client.chat.completions.create(model="unicode", messages=ASKED, stream=True)
    pieces = [chunk.choices[0].delta.content for chunk in stream]
    assert [piece for piece in pieces if piece] == ["a", "é", "世", "!"]


def test_the_end_token_ends_an_answer(client: Any) -> None:
    made = client.chat.completions.create(model="unicode", messages=ASKED)
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("aé世!", "stop")
    assert made.usage.completion_tokens == len("aé世!".encode()) + 1


@pytest.mark.parametrize(("stop", "left"), [("世!", "aé"), (["x", "é"], "a"), ("!?", "aé世!")])
def test_a_stop_text_across_tokens_is_left_out(client: Any, stop: Any, left: str) -> None:
    asked = {"model": "unicode", "messages": ASKED, "stop": stop, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    text, _ = said(client.chat.completions.create(**asked, stream=True))
    assert text == whole.choices[0].message.content == left
    assert whole.choices[0].finish_reason == "stop"
    assert len(whole.choices[0].logprobs.content) >= len(left.encode())
    assert whole.choices[0].logprobs.content[0].token == "a"


def test_tool_calls_are_found_in_the_text(client: Any) -> None:
    asked = {"model": "call", "messages": ASKED, "tools": TOOLS}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "So:"
    call = whole.message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": "é"})
    text, chunks = said(client.chat.completions.create(**asked, stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert text == "So: "
    assert [call.function.name for call in calls] == ["add"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_without_tools_the_text_of_a_call_is_text(client: Any) -> None:
    asked = {"model": "call", "messages": ASKED}
    plain = client.chat.completions.create(**asked).choices[0]
    refused = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none").choices[0]
    assert plain.message.content == refused.message.content
    assert "<tool_call>" in plain.message.content
    assert plain.message.tool_calls is None


def test_a_conversation_with_calls_goes_back_in(client: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    made = client.chat.completions.create(model="unicode", messages=messages, tools=TOOLS)
    assert made.choices[0].message.content == "aé世!"


def test_choices_and_log_probabilities(client: Any) -> None:
    asked = {"model": "ced", "messages": ASKED, "max_tokens": 4, "seed": 3, "temperature": 1.5}
    made = client.chat.completions.create(**asked, n=3, logprobs=True, top_logprobs=2)
    again = client.chat.completions.create(**asked, n=3)
    texts = [choice.message.content for choice in made.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    for choice in made.choices:
        assert len(choice.logprobs.content) == 4
        for score in choice.logprobs.content:
            assert len(score.top_logprobs) == 2
            assert score.logprob <= score.top_logprobs[0].logprob <= 0
    assert made.usage.completion_tokens == 12
    _, chunks = said(client.chat.completions.create(**asked, n=3, stream=True))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2}


def test_text_completions(client: Any) -> None:
    asked = {"model": "plain", "prompt": ["ab", "abc"], "max_tokens": 5, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=1)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage.prompt_tokens == 5
    assert whole.usage.completion_tokens == 10
    for choice in whole.choices:
        scores = choice.logprobs
        assert len(scores.tokens) == len(scores.token_logprobs) == 5
        assert scores.text_offset[0] == 0
        assert scores.text_offset == sorted(scores.text_offset)
    pieces = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [choice.text for choice in whole.choices]


def test_a_prompt_may_be_tokens_and_may_be_echoed(client: Any, byte_tokenizer: Any) -> None:
    ids = byte_tokenizer("ab")["input_ids"]
    asked = {"model": "plain", "max_tokens": 3, "temperature": 0, "echo": True}
    of_text = client.completions.create(**asked, prompt="ab").choices[0].text
    of_tokens = client.completions.create(**asked, prompt=ids).choices[0].text
    of_list = client.completions.create(**asked, prompt=[ids, ids], n=2).choices
    assert of_text == of_tokens
    assert of_text.startswith("ab")
    assert [choice.text for choice in of_list] == [of_text] * 4
    streamed = client.completions.create(**asked, prompt="ab", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == of_text


@pytest.mark.parametrize("streamed", [False, True])
def test_concurrent_clients_get_what_they_would_get_alone(client: Any, streamed: bool) -> None:
    """16 of different lengths, streaming or not."""

    def ask(number: int) -> str:
        asked = {
            "model": "ced", "prompt": "abcdefgh" * (1 + number % 5), "temperature": 0,
            "max_tokens": 2 + number % 4,
        }  # fmt: skip
        if not streamed:
            return str(client.completions.create(**asked).choices[0].text)
        return "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True))

    alone = [ask(number) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


@pytest.mark.parametrize(
    ("keys", "error", "told"),
    [
        ({"model": "other"}, openai.NotFoundError, "no model 'other'"),
        ({"max_tokens": 9999}, openai.BadRequestError, "at most 4096"),
        ({"max_tokens": 600}, openai.BadRequestError, "512 tokens together"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, openai.BadRequestError, "alone"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"n": 99}, openai.BadRequestError, "at most 16 choices"),
        ({"tools": TOOLS}, openai.BadRequestError, "no place for tools"),
        ({"top_logprobs": 2}, openai.BadRequestError, "needs logprobs"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "held to a form"),
        ({"tool_choice": "required"}, openai.BadRequestError, "can't be made to call"),
        ({"logit_bias": {"999": 1}}, openai.BadRequestError, "from 0 to 260"),
    ],
)
def test_what_cannot_hold_is_refused_with_the_reason(
    client: Any, keys: dict[str, Any], error: type[openai.APIStatusError], told: str
) -> None:
    with pytest.raises(error, match=told) as caught:
        client.chat.completions.create(**{"model": "ced", "messages": ASKED, **keys})
    body = caught.value.body
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"echo": True, "logprobs": 1}, "log probabilities of the prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": [[999]]}, "token ids"),
    ],
)
def test_options_of_text_completions_that_cannot_hold(
    client: Any, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        client.completions.create(**{"model": "ced", "prompt": "ab", **keys})


def test_a_template_that_refuses_says_why(client: Any) -> None:
    messages = [{"role": "user", "content": "fail"}]
    with pytest.raises(openai.BadRequestError, match="no such talk"):
        client.chat.completions.create(model="unicode", messages=messages)


def test_the_embedded_default_answers_plain_and_folded(serve: Any, smollm2: Any) -> None:
    """SmolLM2 with the add-on that comes with kvfold, on one set of weights."""
    from kvfold.serving.lane import LaneSettings
    from kvfold.serving.loading import close_lanes, make_lanes
    from kvfold.store.addon import AddOn

    model, tokenizer = smollm2
    addons = {"folded": AddOn.from_pretrained("smollm2-csa2", dtype=model.dtype)}
    lanes = make_lanes(model, tokenizer, addons, plain="plain", settings=LaneSettings())
    try:
        server = serve(lanes)
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
            for name in lanes:
                made = client.chat.completions.create(
                    model=name, messages=asked, temperature=0, max_tokens=8
                )
                assert "Paris" in made.choices[0].message.content
        server.stop()
    finally:
        close_lanes(lanes.values())
