"""Errors of the HTTP APIs: a status, and a body in the schema of the API that was called."""

import json
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Scope

from services.common import errors
from services.common.rpc.status import retry_hint_seconds
from services.gateway.adapters.telemetry.request_record import RequestRecord

KINDS: dict[type[errors.StepwellError], tuple[int, str]] = {
    errors.InvalidArgument: (400, "invalid_request_error"),
    errors.OutOfRange: (400, "invalid_request_error"),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.PermissionDenied: (403, "permission_error"),
    errors.NotFound: (404, "not_found_error"),
    errors.FailedPrecondition: (409, "conflict_error"),
    errors.PayloadTooLarge: (413, "invalid_request_error"),
    errors.QuotaExceeded: (429, "rate_limit_error"),
    errors.ResourceExhausted: (503, "service_unavailable_error"),
    errors.InternalError: (500, "server_error"),
    errors.DeadlineExceeded: (504, "timeout_error"),
    errors.Aborted: (503, "service_unavailable_error"),
    errors.Unavailable: (503, "service_unavailable_error"),
}
"""Maps error classes to HTTP statuses and OpenAI error types. For a class without an entry, the
entry of its nearest ancestor is used. If an error has an `http_status`, it replaces the status.
"""

MEDIA_TYPE = "application/json"

MESSAGES = "/v1/messages"

HINT_HEADERS = ("Retry-After", "Retry-After-Ms", "X-Should-Retry")
"""Headers of refusals that tell clients whether and when to retry."""


class Described(NamedTuple):
    """The content of an error answer: its status and the fields of its body."""

    status: int
    kind: str
    """OpenAI's error type, or the name of the limited quantity if a tenant exceeded a limit."""
    message: str
    field: str | None = None
    code: str | None = None


def plain(status: int, message: str) -> Described:
    """Describes an error that has only a status and a message, such as an unknown path."""
    return Described(status, "invalid_request_error", message)


def described(error: errors.StepwellError) -> Described:
    status, kind = _kind(error)
    if isinstance(error, errors.QuotaExceeded):
        kind = error.quota or kind
    return Described(status, kind, error.message, error.field, error.error_reason.lower())


def error_body(error: errors.StepwellError, message: str | None = None) -> dict[str, object]:
    """Returns the body of an error in OpenAI's schema, with `message` in place of the error's
    message if it is given.
    """
    said = described(error)
    return openai_body(said if message is None else said._replace(message=message))


ErrorBody = Callable[[Described], dict[str, object]]
"""Returns the body of an error in one API's schema."""


def openai_body(error: Described) -> dict[str, object]:
    """Returns {"error": {message, type, param, code}}."""
    texts = {"message": error.message, "type": error.kind}
    return {"error": {**texts, "param": error.field, "code": error.code}}


def anthropic_body(error: Described) -> dict[str, object]:
    """Returns {"type": "error", "error": {type, message, details}}. `details` contains the error
    code. The schema has no key for the invalid field, so the message names the field.
    """
    message = error.message
    if error.field and error.field not in message:
        message = f"{error.field}: {message}"
    is_fault_here = error.status >= _SERVER_ERROR
    general = "api_error" if is_fault_here else "invalid_request_error"
    body = {
        "type": _ANTHROPIC_TYPES.get(error.status, general),
        "message": message,
        "details": None if error.code is None else {"error_code": error.code},
    }
    return {"type": "error", "error": body}


_SERVER_ERROR = 500
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Maps statuses to Anthropic's error types. Any other status has a general type: one for 4xx, and
another for 5xx.
"""


def error_writer(scope: Scope) -> ErrorBody:
    """Returns the function that makes error bodies in the schema of the called API."""
    path = scope["path"]
    is_anthropic = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return anthropic_body if is_anthropic else openai_body


def error_response(error: errors.StepwellError, scope: Scope) -> Response:
    return _response(described(error), scope, error_headers(error))


def error_headers(error: errors.StepwellError) -> dict[str, str]:
    """Returns the headers that tell the client whether to retry, and after which delay."""
    headers = {}
    if (seconds := retry_hint_seconds(error)) is not None:
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
        headers["Retry-After-Ms"] = str(math.ceil(1000 * seconds))
    if error.may_retry is not None:
        headers["X-Should-Retry"] = "true" if error.may_retry else "false"
    if isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def status_of(error: errors.StepwellError) -> int:
    return _kind(error)[0]


def _kind(error: errors.StepwellError) -> tuple[int, str]:
    for ancestor in type(error).__mro__:
        if ancestor in KINDS:
            status, kind = KINDS[ancestor]
            return error.http_status or status, kind
    return KINDS[errors.InternalError]


def plain_error_response(status_code: int, message: str, scope: Scope) -> Response:
    """Returns an error answer with only a status and a message, for example for an unknown path.
    Stores the status's name as the error in the RequestRecord.
    """
    record: RequestRecord = scope["state"]["record"]
    record.failed(HTTPStatus(status_code).name.lower(), message, is_failure=False)
    return _response(plain(status_code, message), scope)


def _response(said: Described, scope: Scope, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps(error_writer(scope)(said))
    return Response(body, status_code=said.status, headers=headers, media_type=MEDIA_TYPE)
