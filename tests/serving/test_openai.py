"""OpenAI's own client is served by a live server as by theirs."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ..openai_cases import TOOLS, OpenAICases

ASKED = [{"role": "user", "content": "Tell me."}]


@pytest.fixture
def asked() -> Any:
    """Each model's own script begins with any message."""
    return lambda name: ASKED


class TestOpenAI(OpenAICases):
    """Those cases."""


def test_models_are_listed_and_found(client: Any) -> None:
    assert [model.id for model in client.models.list()][:2] == ["plain", "ced"]
    assert client.models.retrieve("ced").id == "ced"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_text_before_a_call_is_as_the_model_wrote_it(client: Any) -> None:
    """Whole it is trimmed, in a stream it is gone before the call shows."""
    keys = {"model": "call", "messages": ASKED, "tools": TOOLS}
    whole = client.chat.completions.create(**keys)
    assert whole.choices[0].message.content == "So:"
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = client.chat.completions.create(**keys, stream=True)
    texts = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(texts) == "So: "


def test_several_choices_of_several_prompts_come_in_order(client: Any, byte_tokenizer: Any) -> None:
    ids = byte_tokenizer("ab")["input_ids"]
    keys = {"model": "plain", "max_tokens": 3, "temperature": 0, "echo": True}
    (alone,) = client.completions.create(**keys, prompt="ab").choices
    made = client.completions.create(**keys, prompt=[ids, ids], n=2).choices
    assert [choice.index for choice in made] == [0, 1, 2, 3]
    assert [choice.text for choice in made] == [alone.text] * 4


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
