"""/inference/v1/generate: converts request bodies to requests, and answers to chunks of a stream or
to whole bodies.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.common.telemetry import names
from services.gateway.adapters.http.exchange.dialect import (
    ConvertedRequest,
    StreamingDialect,
    event,
)
from services.gateway.adapters.http.exchange.json_pieces import (
    HoldsLongList,
    LongList,
    json_pieces,
    listed,
    to_json,
)
from services.gateway.adapters.http.openai.bodies import CompletionBody, StreamOptions
from services.gateway.adapters.http.openai.dialect import stop_reason, usage_body
from services.gateway.adapters.http.openai.sampling import (
    check_stream_options,
    client_request,
    sampling_from_body,
)
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.request import ClientRequest, Prompt
from services.gateway.options.vllm_routes.tokens.bodies import GenerateTokensBody

_END = b"data: [DONE]\n\n"
_SHARED = ("stream", "stream_options", "priority", "cache_salt", "skip_reading_prefix_cache")


async def tokens_request(
    body: GenerateTokensBody, inference: Inference, request_id: str
) -> ClientRequest:
    """Converts a body to the request of a text completion whose prompt is the body's tokens."""
    given = {name: getattr(body, name) for name in _SHARED}
    sampled = {name: value for name, value in body.sampling_params if value is not None}
    as_completion = CompletionBody.model_construct(prompt=body.token_ids, **given, **sampled)
    check_stream_options(as_completion)
    sampling = await sampling_from_body(
        as_completion,
        inference,
        max_tokens=body.sampling_params.max_tokens,
        logprobs=body.sampling_params.logprobs,
        prompt_logprobs=None,
    )
    return client_request(as_completion, request_id, (Prompt(body.token_ids),), sampling)


class TokensDialect(StreamingDialect):
    """Writes answers and log-probabilities with token ids and without text."""

    operation = names.GENAI_OPERATION_TEXT_COMPLETION
    id_prefix = "gen"

    def __init__(self, converted: ConvertedRequest[GenerateTokensBody]) -> None:
        options = converted.body.stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._usage_in_every_chunk = bool(options.continuous_usage_stats)
        self._head: dict[str, Any] = {
            "request_id": converted.request.request_id,
            "output_mode": "tokens",
        }
        self._origin = {"model": converted.model_name, "created": converted.created}

    def opening(self, _usage: Usage) -> list[dict[str, Any]]:
        return []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        if not piece.token_ids and piece.finish_reason is None:
            return []
        return [_choice(piece.index, piece, piece)]

    def encode_chunks(
        self, chunks: Sequence[dict[str, Any]], usage: Callable[[], Usage]
    ) -> Iterator[bytes]:
        for chunk in chunks:
            body = {**self._head, "choices": [chunk]}
            if self._usage_in_every_chunk:
                body["usage"] = usage_body(usage())
            try:
                yield b"data: " + to_json(body).encode() + b"\n\n"
            except HoldsLongList:
                yield b"data: "
                yield from json_pieces(body)
                yield b"\n\n"

    def closing(self, usage: Usage, metrics: dict[str, Any] | None) -> bytes:
        if not self._include_usage and metrics is None:
            return _END
        body: dict[str, Any] = {**self._head, "choices": []}
        if self._include_usage:
            body["usage"] = usage_body(usage)
        if metrics is not None:
            body["metrics"] = metrics
        return event(body) + _END

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        choices = (_choice(index, answer, answer.last) for index, answer in enumerate(answers))
        return {
            **self._head,
            **self._origin,
            "choices": LongList(choices, nested=True),
            "usage": usage_body(usage),
        }


def _choice(index: int, part: Piece | Answer, last: Piece) -> dict[str, Any]:
    rows = part.logprobs
    return {
        "index": index,
        "token_ids": listed(part.token_ids, len(part.token_ids)),
        "logprobs": None if rows is None else {"content": listed(_logprobs(rows), len(rows))},
        "finish_reason": last.finish_reason.value if last.finish_reason else None,
        "stop_reason": stop_reason(last),
    }


def _logprobs(rows: LogprobRows) -> Iterator[dict[str, Any]]:
    for ids, probs, own_rank in rows.rows():
        best = enumerate(zip(ids[1:], probs[1:], strict=True), start=1)
        top = [_entry(token_id, prob, rank) for rank, (token_id, prob) in best]
        yield {**_entry(ids[0], probs[0], own_rank), "top_logprobs": top}


def _entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": logprob, "rank": rank}
