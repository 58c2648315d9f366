"""The bodies of answers, for OpenAPI documents; routes write them by hand.

A field with a default may be left out of an answer, and one that may be null says so.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort", "repetition"]
ChatFinishReason = Literal["stop", "length", "abort", "repetition", "tool_calls"]


class Answer(BaseModel):
    """What an answer holds. It is only described: no validator is built for it."""

    model_config = ConfigDict(defer_build=True)


class ErrorDetail(Answer):
    """What is wrong: a sentence, a type as OpenAI's, the field at fault, a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """Every error, also the last event of a stream that broke off."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Generated tokens of the reasoning."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts: each prompt once, every answer, also those of best_of that are not returned."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class RequestMetrics(Answer):
    """Where the time of a request went, where `include_metrics` asks for it: the parts, whose sum
    is `seconds`, and vLLM's numbers, null where the replica has not reported them.
    """

    line: str
    seconds: float
    parts: dict[str, float]
    queue_time_ms: float | None
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class PromptLogprob(Answer):
    """One token that a position of the prompt could have had."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Log-probabilities by token id; the first position has none."""


class CompletionLogprobs(Answer):
    """Four parallel lists, one entry for each token; the first token of an echoed prompt has no
    log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """An answer, or a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    """A whole answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestMetrics | None = None


class CompletionChunk(Answer):
    """One event of a streamed answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice] = Field(max_length=1)
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class Session(Answer):
    """A session, or one that was just ended. `is_held`: a replica keeps its keys and values for the
    next turn.
    """

    id: str
    object: Literal["session"]
    created: int
    model: str
    status: Literal["idle", "in_turn", "ended"]
    num_turns: int
    num_tokens: int
    is_held: bool
    idle_timeout_seconds: float


class TokenLogprob(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """A token of an answer, and the most probable ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """One entry for each token."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Answer):
    """What is called, with the text of its arguments, which is JSON."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionDelta(Answer):
    """The name of a call, then pieces of its arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """What an event adds to a call: its id, type and name in the first one."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class AssistantMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    """An answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    """A whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Delta(Answer):
    """What an event adds to a message: its role in the first one, then text."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    """A piece of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(Answer):
    """One event of a streamed answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice] = Field(max_length=1)
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class Embedding(Answer):
    """The vector of one input: numbers, or their little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    """An answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
    metrics: RequestMetrics | None = None


class Score(Answer):
    """How well a pair of texts goes together."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Answer):
    """An answer of /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage
    metrics: RequestMetrics | None = None
