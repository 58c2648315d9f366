"""The schemas of answers' bodies, for OpenAPI documents. The routes write the bodies without these
classes.

A field with a default may be missing in an answer. A field whose type includes None may be null.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort", "repetition"]
ChatFinishReason = Literal["stop", "length", "abort", "repetition", "tool_calls"]


class Answer(BaseModel):
    """Base class of the schemas of answers, which are not used for validation."""

    model_config = ConfigDict(defer_build=True)


class ErrorDetail(Answer):
    """An error: a sentence for people, OpenAI's type, the invalid field, and a code for
    programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """The body of every error answer, and the last event of a stream that an error ended."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    """The number of prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """The number of generated tokens that are reasoning."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts. Each prompt is counted once. The answers that `best_of` generates but does not
    return are counted, too.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    prompt_cache_ttl: Literal["1h"] | None = None
    """Present only if the client requested to keep the prompt cached for more than an hour."""


class RequestMetrics(Answer):
    """The times of a request. Present if the request sets `include_metrics`. The sum of `parts` is
    `seconds`. The other numbers are metrics of vLLM. They are null if the replica has not reported
    them.
    """

    line: str
    seconds: float
    parts: dict[str, float]
    queue_time_ms: float | None
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class GeneratedAnswer(Answer):
    """The common fields of answers that a replica computed."""

    id: str
    created: int
    model: str
    metrics: RequestMetrics | None = None


class PromptLogprob(Answer):
    """A candidate token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry for each position of the prompt, which maps token ids to candidate tokens. The first
entry is None.
"""


class CompletionLogprobs(Answer):
    """Four parallel lists with one entry for each token. The first token of an echoed prompt has no
    log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """A choice, or the part of a choice that an event adds."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(GeneratedAnswer):
    """A whole answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(GeneratedAnswer):
    """One event of a streamed answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice] = Field(max_length=1)
    usage: Usage | None = None


class TokenLogprob(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """A token of an answer, and the most probable tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """One entry for each token."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Answer):
    """The called function, with the JSON text of its arguments."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionDelta(Answer):
    """The part of a call that an event adds: first the tool's name, later pieces of the
    arguments.
    """

    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """The part that an event adds to a tool call. A call's first event has its id, type and
    name.
    """

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class AssistantMessage(Answer):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    """A whole choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(GeneratedAnswer):
    """A whole answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Delta(Answer):
    """The part that an event adds to a message. The first event has the role, later events have
    text.
    """

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    """The part of a choice that an event adds."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(GeneratedAnswer):
    """One event of a streamed answer of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(max_length=1)
    usage: Usage | None = None


class Embedding(Answer):
    """The vector of one input: a list of numbers, or little-endian float32 numbers in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(GeneratedAnswer):
    """An answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    usage: Usage


class Score(Answer):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class Scores(GeneratedAnswer):
    """An answer of /score."""

    object: Literal["list"]
    data: list[Score]
    usage: Usage
