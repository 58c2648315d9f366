"""The bodies of answers that consist of tokens, for OpenAPI documents."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from services.gateway.adapters.http.openapi.answers import (
    Answer,
    FinishReason,
    RequestMetrics,
    Usage,
)


class RankedToken(Answer):
    """A token, its log-probability, and its rank in the vocabulary if the rank is known."""

    token_id: int
    logprob: float
    rank: int | None


class GeneratedToken(RankedToken):
    """A token of the answer, and the most probable tokens at the token's position."""

    top_logprobs: list[RankedToken]


class TokenLogprobs(Answer):
    """Log-probabilities, with one entry for each token."""

    content: list[GeneratedToken]


class TokensChoice(Answer):
    """A choice of an answer, or an addition to a choice in a stream."""

    index: int
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class GeneratedTokens(Answer):
    """A whole answer of /inference/v1/generate."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens"]
    choices: list[TokensChoice]
    usage: Usage
    metrics: RequestMetrics | None = None


class GeneratedTokensChunk(Answer):
    """One event of a streamed answer of /inference/v1/generate."""

    request_id: str
    output_mode: Literal["tokens"]
    choices: list[TokensChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class RenderedPrompt(Answer):
    """A body for /inference/v1/generate. `token_offsets` are the start and end position of each
    token in the prompt's text, in characters.
    """

    request_id: str
    token_ids: list[int]
    token_offsets: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    skip_reading_prefix_cache: bool | None


class Rendered(RootModel[list[RenderedPrompt]]):
    """One rendered prompt for each prompt of a completion."""
