"""/v1/responses: converts answers to responses and events."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.common.errors import InvalidArgument, StepwellError
from services.common.request.finish import FinishReason
from services.common.telemetry import names
from services.gateway.adapters.http.exchange.dialect import (
    ConvertedRequest,
    StreamingDialect,
    named_event,
)
from services.gateway.adapters.http.exchange.fields import Body
from services.gateway.adapters.http.openai.dialect import clipped_wish
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.adapters.http.openai.responses.item_writer import ItemWriter
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer, Usage

_CUT = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORT: None}
"""Maps finish reasons of incomplete answers to OpenAI's names. OpenAI has no name for an answer
that an operator ended.
"""


class ResponsesDialect(StreamingDialect):
    """Writes one answer in the schema of OpenAI's responses API. A response is a list of items."""

    operation = names.GENAI_OPERATION_CHAT
    id_prefix = "resp"

    def __init__(self, converted: ConvertedRequest[ResponsesBody]) -> None:
        self._writer = ItemWriter(
            converted.request,
            converted.arrival_unix_nanos,
            converted.body.namespaced,
            converted.body.custom_names,
        )
        self._frame = _frame(converted)
        self._last = Piece(0)
        self._num_events = 0

    def opening(self, _usage: Usage) -> list[dict[str, Any]]:
        response = {**self._frame, "status": "in_progress"}
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "response": response} for kind in kinds]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        self._last = piece
        events = self._writer.events(piece)
        if piece.finish_reason is not None:
            events += self._writer.end(_status(piece))
        return events

    def encode_chunks(
        self, chunks: Sequence[dict[str, Any]], _usage: Callable[[], Usage]
    ) -> Iterator[bytes]:
        yield b"".join(map(self._event, chunks))

    def closing(self, usage: Usage, metrics: dict[str, Any] | None) -> bytes:
        response = self._ended(self._last, self._writer.items, usage)
        if metrics is not None:
            response["metrics"] = metrics
        return self._event({"type": f"response.{response['status']}", "response": response})

    @staticmethod
    def refused(error: StepwellError) -> bytes:
        code = _error_code(error)
        problem = {"code": code, "message": error.message, "param": error.field}
        return named_event({"type": "error", **problem, "sequence_number": 0})

    def broken_off(self, error: StepwellError) -> bytes:
        response = {
            **self._frame,
            "status": "failed",
            "output": self._writer.items,
            "error": {"code": _error_code(error), "message": error.message},
        }
        return self._event({"type": "response.failed", "response": response})

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        [answer] = answers
        items = self._writer.whole(answer, _status(answer.last))
        return self._ended(answer.last, items, usage)

    def _ended(self, last: Piece, items: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        status = _status(last)
        response = {**self._frame, "status": status, "output": items, "usage": _usage_body(usage)}
        if status == "incomplete":
            assert last.finish_reason is not None
            response["incomplete_details"] = {"reason": _CUT[last.finish_reason]}
        return response

    def _event(self, body: dict[str, Any]) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event({**body, "sequence_number": number})


def _frame(converted: ConvertedRequest[ResponsesBody]) -> dict[str, Any]:
    body, request = converted.body, converted.request
    form = None if body.text is None else body.text.format
    choice = body.tool_choice or "auto"
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "id": request.request_id,
        "object": "response",
        "created_at": converted.created,
        "model": converted.model_name,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "background": False,
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"} if form is None else _given(form)},
        "tool_choice": choice if isinstance(choice, str) else _given(choice),
        "tools": [_given(tool) for tool in body.tools or () if tool is not None],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
    }


def _given(part: Body) -> dict[str, Any]:
    return part.model_dump(exclude_none=True, by_alias=True)


def _error_code(error: StepwellError) -> str:
    return "invalid_prompt" if isinstance(error, InvalidArgument) else "server_error"


def _status(last: Piece) -> str:
    return "incomplete" if last.finish_reason in _CUT else "completed"


def _usage_body(usage: Usage) -> dict[str, Any]:
    num_cached, num_reasoned = usage.num_cached_tokens, usage.num_reasoning_tokens or 0
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoned},
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        **clipped_wish(usage),
    }
