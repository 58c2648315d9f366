"""Reads OpenAI's server-sent events without parsing the JSON of every one.

Only two things are needed of an ordinary event: whether it carries output, and why the answer
ended. Both stand there as a key with a string, and inside of a JSON string every quotation mark is
escaped, so that a search for the key finds no text of the model. Events with token counts or an
error, one or two of an answer, are parsed.
"""

import json
import re
from typing import Any

from services.cli.bench.core.record import Failure

_OUTPUT = re.compile(rb'"(?:text|content|reasoning_content|reasoning|arguments)"\s*:\s*"(?!")')
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"([^"]*)"')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR = re.compile(rb'"error"\s*:\s*["{]')
_DONE = (b"data: [DONE]", b"data:[DONE]")


class EventStream:
    """One answer. `feed` takes the body's bytes in any pieces."""

    def __init__(self, *, keep_events: bool = False) -> None:
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.failure: Failure | None = None
        self.is_done = False
        """Whether the mark of the end came."""
        self._kept: list[bytes] | None = [] if keep_events else None
        self._rest = b""

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its end."""
        return self.is_done or self.finish_reason is not None

    def feed(self, data: bytes) -> tuple[int, bool]:
        """How many events with output the data completes, and whether it ends the output."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        num_outputs, is_end = 0, False
        for event in events:
            if _OUTPUT.search(event):
                num_outputs += 1
                if self._kept is not None:
                    self._kept.append(event)
            if b'"finish_reason"' in event and (finished := _FINISHED.search(event)):
                self.finish_reason = finished[1].decode()
                is_end = True
            if b'"usage"' in event and _USAGE.search(event):
                self._count(event)
            elif event in _DONE:
                self.is_done = True
            elif b'"error"' in event and _ERROR.search(event):
                self._fail(event)
        return num_outputs, is_end

    def text(self) -> str:
        """The answer's text, of its first choice; what a model reasons is no part of it."""
        return "".join(map(_text_of, self._kept or ()))

    def _count(self, event: bytes) -> None:
        body = _parsed(event)
        if isinstance(body, dict) and isinstance(body.get("usage"), dict):
            self.usage = body["usage"]

    def _fail(self, event: bytes) -> None:
        body = _parsed(event)
        if isinstance(body, dict) and body.get("error"):
            self.failure = Failure("stream", error_message(body))


def error_message(body: Any) -> str:
    """What an error in OpenAI's shape, or another body, says, in at most 200 characters."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200]


def answer_text(choice: dict[str, Any], key: str) -> str:
    """The text of a choice: of the completions API, or below `key` of the chat API."""
    text = choice.get("text") or (choice.get(key) or {}).get("content")
    return text if isinstance(text, str) else ""


def _text_of(event: bytes) -> str:
    body = _parsed(event)
    choices = body.get("choices") if isinstance(body, dict) else None
    return answer_text(choices[0], "delta") if choices else ""


def _parsed(event: bytes) -> Any:
    """The JSON of an event's data; None of what is none."""
    lines = (line.partition(b":") for line in event.split(b"\n"))
    data = b"\n".join(value.removeprefix(b" ") for name, _, value in lines if name == b"data")
    try:
        return json.loads(data)
    except ValueError:
        return None
