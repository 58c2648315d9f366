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
    404: ErrorAnswer("NotFound", "What the request names is not there, such as its model."),
    405: ErrorAnswer("MethodNotAllowed", "The path does not take this method.", ("Allow",)),
    408: ErrorAnswer("RequestTimeout", "The request did not arrive in time."),
    409: ErrorAnswer("Conflict", "The state does not allow it."),
    413: ErrorAnswer("BodyTooLarge", "The body is larger than what is read."),
    415: ErrorAnswer("NotJson", "The body is not uncompressed JSON.", ("Accept-Encoding",)),
    421: ErrorAnswer("Misdirected", "The server does not answer to this Host."),
    429: ErrorAnswer("TooManyRequests", "The tenant is over a limit of its own.", HINT_HEADERS),
    431: ErrorAnswer("HeadersTooLarge", "There are too many headers, or too large ones."),
    500: ErrorAnswer(
        "InternalError", "A defect here, or a request that breaks its steps.", HINT_HEADERS
    ),
    503: ErrorAnswer("Unavailable", "The load is too high, or no replica ready.", HINT_HEADERS),
    504: ErrorAnswer(
        "DeadlineExceeded", "The request's time passed before its answer was made.", HINT_HEADERS
    ),
}

EVERYWHERE = (400, 405, 408, 421, 429, 431, 500, 503)
"""The error statuses that every route can have. The cause is the connection, the headers or the
server's state.
"""


def _header(description: str, schema: dict[str, Any] = _TEXT) -> dict[str, Any]:
    return {"description": description, "schema": schema}


LIMIT_HEADER = _header("Of the tenant's limits, as OpenAI says it.")
HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": _header(
        "The request's name in logs and traces, unless it was refused before its headers were read."
    ),
    "X-Trace-Id": _header("The id of its trace, as 32 hexadecimal digits, on the same answers."),
    IGNORED_FIELDS: _header("Fields of the body that have no effect, where there are some."),
    "Retry-After": _header("Seconds after which trying again may help.", _WHOLE),
    "Retry-After-Ms": _header("The same in milliseconds.", _WHOLE),
    "X-Should-Retry": _header(
        "false where the same request would end the same again.",
        {**_TEXT, "enum": ["true", "false"]},
    ),
    "WWW-Authenticate": _header("Bearer."),
    "Allow": _header("The methods that the path takes."),
    "Accept-Encoding": _header("identity, where the body was compressed."),
}
