"""The answers of Anthropic's messages API, for OpenAPI documents."""

from typing import Any, Literal

from services.gateway.adapters.http.openapi.answers import Answer, RequestMetrics

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
]


class AnthropicErrorCode(Answer):
    """The details of an error: a code for programs."""

    error_code: str


class AnthropicErrorDetail(Answer):
    """An error: Anthropic's type, and a sentence for people, which names the invalid field."""

    type: str
    message: str
    details: AnthropicErrorCode | None


class AnthropicError(Answer):
    """The body of every error answer, and the last event of a stream that an error ended."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class TextContent(Answer):
    """A block of text."""

    type: Literal["text"]
    text: str


class ThinkingContent(Answer):
    """A block of the model's thinking. Its signature is the SHA-256 of the text."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Answer):
    """A block with a tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class OutputTokensDetails(Answer):
    """The number of generated tokens that are reasoning."""

    thinking_tokens: int


class AnthropicUsage(Answer):
    """Token counts. `input_tokens` excludes cached prompt tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = None
    prompt_cache_ttl: Literal["1h"] | None = None
    """Present only if the client requested to keep the prompt cached for more than an hour."""


class AnthropicResponse(Answer):
    """A whole answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage
    metrics: RequestMetrics | None = None


class TextDelta(Answer):
    """The text that an event adds."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Answer):
    """The thinking that an event adds."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(Answer):
    """The signature of a thinking block: the SHA-256 of its whole text."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(Answer):
    """The part of the JSON text of a call's input that an event adds."""

    type: Literal["input_json_delta"]
    partial_json: str


class MessageEnd(Answer):
    """The reason why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class AnthropicEvent(Answer):
    """One event of a streamed answer of /v1/messages. The type of the event determines its other
    fields: a message, an index with a block or a delta, a delta with usage, or none.
    """

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: AnthropicResponse | None = None
    index: int | None = None
    content_block: ContentBlock | None = None
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta | MessageEnd | None = None
    usage: AnthropicUsage | None = None
    metrics: RequestMetrics | None = None


class TokenCount(Answer):
    """An answer of /v1/messages/count_tokens."""

    input_tokens: int
