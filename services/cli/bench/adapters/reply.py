"""Receives the server's responses, each of which is a stream of events or one JSON body."""

import json
from typing import Any

from services.cli.bench.adapters.event_stream import EventStream, answer_text, error_message
from services.cli.bench.core.record import Failure, RequestRecord

_OK = 200
_MAX_ERROR_BYTES = 4096


class AnswerReply:
    """The response to one request. `finish` writes the measurements into the request's record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._status = 0
        self._error = b""

    def headers(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes, now: float) -> None:
        if self._status == _OK:
            self.answer(data, now)
        elif len(self._error) < _MAX_ERROR_BYTES:
            self._error += data

    def answer(self, data: bytes, now: float) -> None:
        """Accepts a piece of the body of a response with status 200."""
        raise NotImplementedError

    def finish(self, failure: Failure | None) -> str | None:
        """Ends the exchange. Returns the output text, or None if the request failed."""
        self._record.failure = failure or self._refusal() or self.failure()
        return self.text() if self._record.failure is None else None

    def failure(self) -> Failure | None:
        """Returns why the response is invalid, or records its token counts and returns None."""
        raise NotImplementedError

    def text(self) -> str:
        raise NotImplementedError

    def _refusal(self) -> Failure | None:
        if self._status == _OK:
            return None
        try:
            message = error_message(json.loads(self._error))
        except ValueError:
            message = self._error.decode(errors="replace")[:200]
        return Failure(f"http {self._status}", message)


class StreamReply(AnswerReply):
    """A response with server-sent events."""

    def __init__(self, record: RequestRecord, *, keep_answer: bool) -> None:
        super().__init__(record)
        self._events = EventStream(keep_events=keep_answer)

    def answer(self, data: bytes, now: float) -> None:
        num_outputs, is_end = self._events.feed(data)
        record = self._record
        if is_end and not num_outputs and not record.token_times:
            num_outputs = 1  # an output without text, such as only special tokens, also counts
        for _ in range(num_outputs):
            record.token_times.append(now)
        if num_outputs or is_end:
            record.ended = now

    def failure(self) -> Failure | None:
        events, record = self._events, self._record
        if events.failure is not None:
            return events.failure
        if not events.is_whole:
            return Failure("broken", "the stream ended before the answer")
        if not record.token_times:
            return Failure("no output", "the stream has no event with output")
        record.finish_reason = events.finish_reason
        record_usage(record, events.usage)
        return None

    def text(self) -> str:
        return self._events.text()


class WholeReply(AnswerReply):
    """A response with one JSON body."""

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record)
        self._pieces: list[bytes] = []
        self._choice: dict[str, Any] = {}

    def answer(self, data: bytes, now: float) -> None:
        self._pieces.append(data)
        self._record.ended = now

    def failure(self) -> Failure | None:
        try:
            body = json.loads(b"".join(self._pieces))
            self._choice = body["choices"][0]
        except (ValueError, LookupError, TypeError):
            return Failure("malformed", "the answer is not JSON with choices")
        self._record.finish_reason = self._choice.get("finish_reason")
        record_usage(self._record, body.get("usage"))
        return None

    def text(self) -> str:
        return answer_text(self._choice, "message")


def record_usage(record: RequestRecord, usage: Any) -> None:
    """Writes the token counts of a `usage` object into the record. Any count may be missing."""
    if not isinstance(usage, dict):
        return
    record.num_input_tokens = _count(usage, "prompt_tokens")
    record.num_output_tokens = _count(usage, "completion_tokens")
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        record.num_cached_tokens = _count(details, "cached_tokens")


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None
