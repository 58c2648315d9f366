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
    """A code for programs."""

    error_code: str


class AnthropicErrorDetail(Answer):
    """An error: Anthropic's type, and a sentence that names the invalid field."""

    type: str
    message: str
    details: AnthropicErrorCode | None


class AnthropicError(Answer):
    """Every error body, also the last event of a stream that an error ended."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class TextContent(Answer):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingContent(Answer):
    """The model's thinking, with its SHA-256 as the signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Answer):
    """A call of a tool."""

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
    """More text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Answer):
    """More thinking."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(Answer):
    """The SHA-256 of the whole thinking."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(Answer):
    """More of the JSON text of a call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class MessageEnd(Answer):
    """The reason why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class AnthropicEvent(Answer):
    """One event of a streamed answer of /v1/messages. Its type determines its fields: a message; an
    index with a block or a delta; a delta with usage; or none.
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
