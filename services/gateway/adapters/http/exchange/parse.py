"""Converts the bytes of a body to a body object, or raises an error that names the field."""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from services.common.errors import InvalidArgument, PayloadTooLarge
from services.gateway.adapters.http.exchange.fields import BodyNotes
from services.gateway.adapters.http.exchange.ignored_fields import (
    IGNORE,
    IgnoredFieldLog,
    field_name,
)
from services.gateway.adapters.http.exchange.request_state import HELD_BODY
from services.gateway.adapters.http.transport.body_budget import BodyBudget
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.traces.timeline import Part

MAX_KEYS = 10_000
MAX_BRACKETS = 10_000
_MAX_KEY_LENGTH = 64


class JsonMeter:
    """Counts the commas, colons and brackets of a JSON text outside strings while its bytes arrive,
    so that texts with too many values are refused before parsing, which would block the event loop.
    Does not check whether the text is JSON.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._num_values = self._num_keys = self._num_brackets = 0
        self._in_string = False
        self._backslash = b""
        self._key = ""

    def feed(self, piece: bytes) -> None:
        """Reads the next piece. Raises InvalidArgument once a limit is exceeded."""
        text = self._backslash + piece
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        self._backslash = b"\\" if num_backslashes % 2 else b""
        if self._backslash:
            text = text[:-1]
        parts = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        if b":" in outside:
            self._key = _last_key(parts) or self._key
        self._in_string ^= len(parts) % 2 == 0
        self._num_values += outside.count(b",")
        self._num_keys += outside.count(b":")
        self._num_brackets += outside.count(b"[") + outside.count(b"{")
        for count, most, what in (
            (self._num_values, self._max_values, "values"),
            (self._num_keys, MAX_KEYS, "keys"),
            (self._num_brackets, MAX_BRACKETS, "lists and objects"),
        ):
            if count > most:
                where = f"{self._key}: " if self._key and what != "keys" else ""
                raise InvalidArgument(
                    f"{where}the body holds more than {most} {what}; one request may not",
                    field=self._key if where else None,
                    reason="TOO_MANY_ITEMS",
                )


def _last_key(parts: list[bytes]) -> str:
    """Returns the last object key in these parts of the text, for an error message. Returns "" if
    the key is incomplete or is not an identifier.
    """
    for place in range(len(parts) - 1, 0, -1):
        if parts[place].lstrip()[:1] == b":":
            key = parts[place - 1].decode("latin-1")
            return key if key.isidentifier() and len(key) <= _MAX_KEY_LENGTH else ""
    return ""


B = TypeVar("B", bound=BaseModel)

_SMALL_BYTES = 16 * 1024
"""Limit on the bytes of a body that is parsed and converted in one iteration of the event loop."""
_MAX_PROBLEMS = 100
"""Limit on the problems of a body that are listed. Listing a hundred thousand problems would take
longer than serving a request.
"""
_MAX_NAME = 100
"""Limit on the characters of a client's field name in an error. Longer names are cut."""


class BodyReader:
    """Reads bodies of at most `max_bytes` bytes and `max_values` JSON values. `budget` bounds the
    total bytes of the bodies that are read at the same time.

    If `unknown_fields` is IGNORE, unknown fields are ignored. If it is REFUSE, they are errors. The
    names of ignored fields, and of known fields that have no effect, are stored in the
    RequestRecord.
    """

    def __init__(
        self, max_bytes: int, max_values: int, budget: BodyBudget, unknown_fields: str = IGNORE
    ) -> None:
        self._max_bytes = max_bytes
        self._max_values = max_values
        self._budget = budget
        self._ignores_unknown = unknown_fields == IGNORE
        self._log = IgnoredFieldLog()

    async def read(self, request: Request, model: type[B]) -> B:
        """Reads and validates a body. If Content-Length exceeds the limit, nothing is read."""
        record: RequestRecord = request.scope["state"]["record"]
        num_bytes = _declared_bytes(record, self._max_bytes)
        if self._budget.is_counted(num_bytes):
            record.wait("body_budget")
        held = request.scope["state"].pop(HELD_BODY, None) or self._budget.hold(
            num_bytes, request.state.caller.caller_id
        )
        async with held:
            record.enter(Part.READ)
            raw = await self._read(request)
            record.enter(Part.PARSE)
            body, ignored = parse_body(raw, model, ignores_unknown=self._ignores_unknown)
            if ignored:
                record.ignored_fields = ignored
                self._log.note(record.call.path, ignored, model.model_fields)
            if len(raw) > _SMALL_BYTES:
                await asyncio.sleep(0)  # the caller's work on the body runs in the next iteration
            return body

    async def _read(self, request: Request) -> bytes:
        chunks, size = [], 0
        meter = JsonMeter(self._max_values)
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > self._max_bytes:
                    raise _too_large(self._max_bytes)
                meter.feed(chunk)
                chunks.append(chunk)
        except ClientDisconnect as error:
            raise InvalidArgument("the body ended before it was complete") from error
        return b"".join(chunks)


def parse_body(
    raw: bytes, model: type[B], *, ignores_unknown: bool = True
) -> tuple[B, tuple[str, ...]]:
    """Returns the body, and the names of its fields that have no effect. If the body is invalid,
    raises InvalidArgument with the name of the first invalid field.
    """
    notes = BodyNotes()
    try:
        body = model.model_validate_json(raw, context=notes)
    except ValidationError as error:
        unknown = _unknown_fields(error) if ignores_unknown else ()
        if not unknown:
            raise refusal(error, "the body") from error
        notes = BodyNotes([*unknown])
        try:
            body = model.model_validate_json(raw, context=notes, extra="ignore")
        except ValidationError as remaining:
            raise refusal(remaining, "the body") from remaining
    return body, tuple(dict.fromkeys(notes.ignored))


def _unknown_fields(error: ValidationError) -> tuple[str, ...]:
    if error.error_count() > _MAX_PROBLEMS:
        return (f"{error.error_count()} fields",)
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    return tuple(field_name(each["loc"]) for each in problems if each["type"] == _UNKNOWN)


def _declared_bytes(record: RequestRecord, max_bytes: int) -> int:
    """Returns the Content-Length, or the largest allowed size if the request has no such header."""
    declared = record.headers.get("content-length", "")
    if not declared.isdigit():
        return max_bytes
    if int(declared) > max_bytes:
        raise _too_large(max_bytes)
    return int(declared)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than the limit of {max_bytes} bytes")


_UNKNOWN = "extra_forbidden"
_SENTENCES = {
    _UNKNOWN: ("{where} is no known parameter", "UNKNOWN_PARAMETER"),
    "missing": ("{where} is missing", "MISSING_PARAMETER"),
    "not_supported": ("{where} is not supported: {what}", "UNSUPPORTED_PARAMETER"),
    "alternative": ("{where} {what}", None),
    "model_type": ("{where} must be a JSON object", None),
}
"""Maps some of pydantic's error types to a message and a reason. Errors of other types get
pydantic's message and no reason.
"""


def refusal(error: ValidationError, whole: str) -> InvalidArgument:
    """Converts a validation error to an error that names the first invalid field. `whole` is the
    phrase for the validated object in the message, such as "the body".
    """
    if error.error_count() > _MAX_PROBLEMS:
        return InvalidArgument(f"{whole} has {error.error_count()} wrong or unknown fields")
    problem = error.errors(include_url=False, include_input=False)[0]
    kind, where, what = problem["type"], _path(problem["loc"]), problem["msg"]
    if kind == "json_invalid":
        return InvalidArgument(f"{whole} is not JSON: {problem['ctx']['error']}")
    sentence, reason = _SENTENCES.get(kind, ("{where}: {what}", None))
    if kind not in _SENTENCES:
        what = what[:1].lower() + what[1:]
    message = sentence.format(where=where or whole, what=what)
    return InvalidArgument(message, field=where or None, reason=reason)


def _path(location: tuple[int | str, ...]) -> str:
    """Converts a location that pydantic reports to a path such as `messages[0].content`."""
    path = ""
    for place, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif place == 0:
            path = part[:_MAX_NAME]
        elif not part.startswith("<"):
            path += f".{part[:_MAX_NAME]}"
    return path
