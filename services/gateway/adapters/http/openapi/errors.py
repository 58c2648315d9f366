"""The error statuses of answers with their descriptions, and the headers of answers."""

from dataclasses import dataclass
from typing import Any

from services.gateway.adapters.http.exchange.errors import HINT_HEADERS
from services.gateway.adapters.http.exchange.ignored_fields import HEADER as IGNORED_FIELDS

_TEXT: dict[str, Any] = {"type": "string"}
_WHOLE: dict[str, Any] = {"type": "integer", "minimum": 1}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error status: its name, its cause, and headers that the answer may have. X-Request-Id and
    X-Trace-Id are not listed, because answers with any status have them.
    """

    name: str
    description: str
    headers: tuple[str, ...] = ()


ERRORS: dict[int, ErrorAnswer] = {
    400: ErrorAnswer("BadRequest", "The request is wrong; `param` names the field at fault."),
    401: ErrorAnswer(
        "Unauthenticated", "No API key, or one that is not known.", ("WWW-Authenticate",)
    ),
    403: ErrorAnswer("Forbidden", "The key, or the page that sends the request, may not do this."),
    404: ErrorAnswer(
        "NotFound", "The request names a path, a model or another thing that does not exist."
    ),
    405: ErrorAnswer("MethodNotAllowed", "The path does not support this method.", ("Allow",)),
    408: ErrorAnswer("RequestTimeout", "The request did not arrive within the time limit."),
    409: ErrorAnswer(
        "Conflict",
        "The present state of the server, or of what the request names, does not allow the "
        "request.",
    ),
    413: ErrorAnswer("BodyTooLarge", "The body is larger than the server's limit."),
    415: ErrorAnswer("NotJson", "The body is not JSON, or it is compressed.", ("Accept-Encoding",)),
    421: ErrorAnswer("Misdirected", "The server does not accept this value of the header Host."),
    429: ErrorAnswer("TooManyRequests", "The tenant has reached one of its limits.", HINT_HEADERS),
    431: ErrorAnswer(
        "HeadersTooLarge", "The request has too many headers, or headers that are too large."
    ),
    500: ErrorAnswer(
        "InternalError",
        "A defect of the server, or a request that makes the engine's steps fail.",
        HINT_HEADERS,
    ),
    503: ErrorAnswer("Unavailable", "The load is too high, or no replica is ready.", HINT_HEADERS),
    504: ErrorAnswer(
        "DeadlineExceeded",
        "The request's time limit passed before the answer was complete.",
        HINT_HEADERS,
    ),
}

EVERYWHERE = (400, 405, 408, 421, 429, 431, 500, 503)
"""The error statuses that every route can have, because the connection, the headers or the server's
state can cause them.
"""


def _header(description: str, schema: dict[str, Any] = _TEXT) -> dict[str, Any]:
    return {"description": description, "schema": schema}


LIMIT_HEADER = _header(
    "State of one of the tenant's limits, in the form of OpenAI's header of this name."
)
HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": _header(
        "The request's id in logs and traces. Absent if the request was refused before its headers "
        "were read."
    ),
    "X-Trace-Id": _header(
        "The id of the request's trace, as 32 hexadecimal digits. Present if X-Request-Id is."
    ),
    IGNORED_FIELDS: _header(
        "The names of the body's fields that have no effect. Absent if there are none."
    ),
    "Retry-After": _header("Seconds after which trying again may help.", _WHOLE),
    "Retry-After-Ms": _header("Milliseconds after which trying again may help.", _WHOLE),
    "X-Should-Retry": _header(
        "false if the same request would fail again.",
        {**_TEXT, "enum": ["true", "false"]},
    ),
    "WWW-Authenticate": _header("Bearer."),
    "Allow": _header("The methods that the path supports."),
    "Accept-Encoding": _header("identity, if the request's body was compressed."),
}
