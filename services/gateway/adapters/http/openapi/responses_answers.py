"""The answers of OpenAI's responses API, for OpenAPI documents."""

from typing import Any, Literal

from services.gateway.adapters.http.openapi.answers import Answer, RequestMetrics

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    """A part with text of the model."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningContent(Answer):
    """A part with the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Answer):
    """An item with a message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(Answer):
    """An item with the model's reasoning, before its message or call."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    status: ItemStatus
    content: list[ReasoningContent]


class OutputCall(Answer):
    """An item with a function call. Its arguments are JSON text."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class OutputCustomCall(Answer):
    """An item with a call of a custom tool. Its input is any text."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class ResponseFault(Answer):
    """Why a response failed after its stream had begun."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer):
    """Why a response is incomplete: `max_output_tokens`, or null if an operator ended the
    response.
    """

    reason: Literal["max_output_tokens"] | None


class InputTokensDetails(Answer):
    """The number of prompt tokens that were found in the prefix cache, and the number that were
    written to the cache. The second number is always 0, because clients do not pay for writing.
    """

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: "ReasoningTokensDetails"
    total_tokens: int
    prompt_cache_ttl: Literal["1h"] | None = None
    """Present only if the client requested to keep the prompt cached for more than an hour."""


class ReasoningTokensDetails(Answer):
    """The number of generated tokens that are reasoning."""

    reasoning_tokens: int


class ReasoningAsked(Answer):
    """The reasoning settings of the request."""

    effort: str | None
    summary: None


class ResponseObject(Answer):
    """A whole answer of /v1/responses, or the beginning of a streamed answer. It repeats the
    request's parameters.
    """

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningAsked
    background: Literal[False]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    metrics: RequestMetrics | None = None


class ResponseEvent(Answer):
    """One event of a streamed answer of /v1/responses. The type of the event determines its other
    fields.
    """

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputText | ReasoningContent | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[Any] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
