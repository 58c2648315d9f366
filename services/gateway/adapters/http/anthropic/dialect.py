"""/v1/messages: converts answers to messages and events."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.common.errors import StepwellError
from services.common.request.finish import FinishReason
from services.common.telemetry import names
from services.gateway.adapters.http.anthropic.block_writer import BlockWriter
from services.gateway.adapters.http.anthropic.bodies import MessagesBody
from services.gateway.adapters.http.exchange.dialect import (
    ConvertedRequest,
    StreamingDialect,
    named_event,
)
from services.gateway.adapters.http.exchange.errors import anthropic_body, described
from services.gateway.adapters.http.openai.dialect import clipped_wish
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.text.parsing.events import CallStart

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.REPETITION: "end_turn",
    # With this reason, the client may send the partial answer back, so that it is continued.
    FinishReason.ABORT: "pause_turn",
}


class MessagesDialect(StreamingDialect):
    """Writes one answer in Anthropic's schema: a message of blocks."""

    operation = names.GENAI_OPERATION_CHAT
    id_prefix = "msg"
    keep_alive = named_event({"type": "ping"})

    def __init__(self, converted: ConvertedRequest[MessagesBody]) -> None:
        self._request = converted.request
        self._model = converted.model_name
        thinking = converted.body.thinking
        is_omitted = thinking is not None and thinking.display == "omitted"
        self._blocks = BlockWriter(
            converted.request, converted.arrival_unix_nanos, shows_thinking=not is_omitted
        )
        self._last = Piece(0)
        self._has_called = False

    def opening(self, usage: Usage) -> list[dict[str, Any]]:
        message = self._message([], None, None, usage)
        return [{"type": "message_start", "message": message}]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        self._last = piece
        self._has_called |= any(isinstance(event, CallStart) for event in piece.events or ())
        return self._blocks.events(piece)

    def encode_chunks(
        self, chunks: Sequence[dict[str, Any]], _usage: Callable[[], Usage]
    ) -> Iterator[bytes]:
        yield b"".join(map(named_event, chunks))

    def closing(self, usage: Usage, metrics: dict[str, Any] | None) -> bytes:
        reason, sequence = self._stop(self._last, usage, has_called=self._has_called)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": _usage_body(usage)}
        if metrics is not None:
            last["metrics"] = metrics
        return named_event(last) + named_event({"type": "message_stop"})

    @staticmethod
    def refused(error: StepwellError) -> bytes:
        return named_event(anthropic_body(described(error)))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        [answer] = answers
        has_called = bool(answer.message.calls)
        reason, sequence = self._stop(answer.last, usage, has_called=has_called)
        return self._message(self._blocks.whole(answer), reason, sequence, usage)

    def _message(
        self,
        blocks: list[dict[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: Usage,
    ) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": _usage_body(usage),
        }

    def _stop(self, last: Piece, usage: Usage, *, has_called: bool) -> tuple[str, str | None]:
        assert last.finish_reason is not None
        if isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        if has_called and last.finish_reason is FinishReason.STOP:
            return "tool_use", None
        most = self._request.default_max_tokens
        is_cut = last.finish_reason is FinishReason.LENGTH
        if is_cut and most is not None and usage.num_generated_tokens < most:
            return "model_context_window_exceeded", None
        return _STOP_REASONS[last.finish_reason], None


def _usage_body(usage: Usage) -> dict[str, Any]:
    """The token counts. As in Anthropic's API, `input_tokens` excludes cached prompt tokens."""
    body: dict[str, Any] = {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_generated_tokens,
    }
    if usage.num_reasoning_tokens is not None:
        body["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning_tokens}
    return body | clipped_wish(usage)
