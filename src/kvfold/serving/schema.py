"""What requests may say: OpenAI's chat and text completions, strictly typed.

Keys that only label a request are accepted and mean nothing here. Those that would change the
answer and are not supported have a value that they may have, and are refused with any other by
`kvfold.serving.asking`, which knows the reason. Unknown keys are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_STOPS = 4
MOST_CHOICES = 128
MOST_TOKENS = 2**31 - 1

Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class Strict(BaseModel):
    """No key that is not named, no number as a string, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream brings beside the answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Common(Strict):
    """What both kinds of completion may say.

    kvfold_cache is kvfold's own: tell with each choice what its cache takes.
    """

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: TokenCount | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    kvfold_cache: bool | None = None


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """What an earlier answer called; arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Strict):
    """A function that the model may call; parameters as a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Something that the model may call."""

    type: Literal["function"]
    function: Function


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


Prompt = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
)


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetail
