"""Reads OpenAI's server-sent events without parsing the JSON of each event.

For an ordinary event only two facts matter: whether it has output, and its finish reason. A search
for the JSON key of either fact suffices. It cannot match text of the model, since quotation marks
inside JSON strings are escaped. Only events with token counts or an error are parsed, one or two in
each response.
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
    """The stream of one response. `feed` accepts the bytes of the body in pieces of any size."""

    def __init__(self, *, keep_events: bool = False) -> None:
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.failure: Failure | None = None
        self.is_done = False
        """Whether the end mark (`[DONE]`) has arrived."""
        self._kept: list[bytes] | None = [] if keep_events else None
        self._rest = b""

    @property
    def is_whole(self) -> bool:
        """Whether the response is complete, that is, has the end mark or a finish reason."""
        return self.is_done or self.finish_reason is not None

    def feed(self, data: bytes) -> tuple[int, bool]:
        """Returns the number of output events that end in `data`, and whether the output ended."""
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
        """The text of the first choice, without reasoning. Requires `keep_events`."""
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
    """The message in an error's body, in OpenAI's schema or any other. At most 200 characters."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200]


def answer_text(choice: dict[str, Any], key: str) -> str:
    """The text of a choice. In the chat API it is in the choice's object named `key`."""
    text = choice.get("text") or (choice.get(key) or {}).get("content")
    return text if isinstance(text, str) else ""


def _text_of(event: bytes) -> str:
    body = _parsed(event)
    choices = body.get("choices") if isinstance(body, dict) else None
    return answer_text(choices[0], "delta") if choices else ""


def _parsed(event: bytes) -> Any:
    lines = (line.partition(b":") for line in event.split(b"\n"))
    data = b"\n".join(value.removeprefix(b" ") for name, _, value in lines if name == b"data")
    try:
        return json.loads(data)
    except ValueError:
        return None
