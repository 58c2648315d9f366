"""The bodies of /derender: generated tokens, and the request for which they were generated."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.adapters.http.exchange.fields import (
    Body,
    Ignored,
    Int,
    Only,
    TokenId,
    TokenIds,
)
from services.gateway.adapters.http.openai.bodies import ChatCompletionBody, CompletionBody

_NO_STREAM = "this route reads complete answers only"
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Float32 = Annotated[float, Field(gt=-(2.0**127), lt=2.0**127)]


class RankedTokenBody(Body):
    """A token and its log-probability."""

    token_id: TokenId
    logprob: _Float32
    rank: _Count | None = None


class GeneratedTokenBody(RankedTokenBody):
    """A token of the answer, and the most probable tokens at the token's position."""

    top_logprobs: Annotated[list[RankedTokenBody], Field(fail_fast=True, default_factory=list)]


class TokenLogprobsBody(Body):
    """Log-probabilities, with one entry for each token."""

    content: Annotated[list[GeneratedTokenBody], Field(fail_fast=True)] | None = None


class TokensChoiceBody(Body):
    """A choice of an answer, given as tokens."""

    index: Int
    token_ids: TokenIds | None = None
    logprobs: TokenLogprobsBody | None = None
    finish_reason: Literal["stop", "length", "abort", "repetition"] | None = None
    stop_reason: str | Int | None = None

    @model_validator(mode="after")
    def _has_a_row_for_each_token(self) -> Self:
        rows = self.rows
        if rows and len(rows) != len(self.token_ids or ()):
            raise PydanticCustomError("alternative", "must have logprobs for each of its token_ids")
        if len({len(row.top_logprobs) for row in rows}) > 1:
            raise PydanticCustomError("alternative", "must have equally many top_logprobs each")
        return self

    @property
    def rows(self) -> list[GeneratedTokenBody]:
        """The log-probabilities, with one entry per token."""
        return (self.logprobs and self.logprobs.content) or []


class GeneratedTokensBody(Body):
    """A whole answer of /inference/v1/generate."""

    request_id: str = Field(min_length=1, max_length=256)
    choices: Annotated[list[TokensChoiceBody], Field(min_length=1, fail_fast=True)]
    output_mode: Annotated[Any, Only("tokens", why="this route reads token ids only")] = None
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: Annotated[
        Any, Only(why="only /v1/completions and /v1/chat/completions support this field")
    ] = None
    model: Ignored = None
    created: Ignored = None
    usage: Ignored = None
    metrics: Ignored = None
    kv_transfer_params: Ignored = None
    ec_transfer_params: Ignored = None

    @model_validator(mode="after")
    def _has_numbered_choices(self) -> Self:
        if [choice.index for choice in self.choices] != [*range(len(self.choices))]:
            raise PydanticCustomError("alternative", "must have choices in order of index, from 0")
        return self


class DerenderChatBody(Body):
    """POST /v1/chat/completions/derender."""

    generate_response: GeneratedTokensBody
    model: str | None = None
    prompt_tokens: _Count | None = None
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatCompletionBody | None = None
    stream: Annotated[Any, Only(False, why=_NO_STREAM)] = None


class DerenderCompletionBody(Body):
    """POST /v1/completions/derender: one answer for each prompt of the request."""

    generate_responses: Annotated[list[GeneratedTokensBody], Field(min_length=1, fail_fast=True)]
    model: str | None = None
    prompt_tokens: list[_Count] | None = None
    prompt_token_ids: list[TokenIds | None] | None = None
    completion_request: CompletionBody | None = None
    stream: Annotated[Any, Only(False, why=_NO_STREAM)] = None

    @model_validator(mode="after")
    def _has_as_many_prompts(self) -> Self:
        for given in (self.prompt_tokens, self.prompt_token_ids):
            if given is not None and len(given) != len(self.generate_responses):
                raise PydanticCustomError(
                    "alternative",
                    "must have prompt_tokens and prompt_token_ids for each of generate_responses",
                )
        return self
