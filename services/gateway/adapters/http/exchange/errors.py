"""Errors of the HTTP APIs: a status, and a body in the schema of the API that was called."""

import json
import math
from collections.abc import Hashable
from http import HTTPStatus
from typing import NamedTuple, Protocol

from starlette.responses import Response
from starlette.types import Scope

from services.common import errors
from services.common.rpc.retry_hint import retry_hint_seconds
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
"""Maps error classes to HTTP statuses and OpenAI error types. A class without an entry has the
entry of its nearest ancestor. A class with an `http_status` replaces the status.
"""

MEDIA_TYPE = "application/json"

MESSAGES = "/v1/messages"
"""The path of Anthropic's API."""

HINT_HEADERS = ("Retry-After", "Retry-After-Ms", "X-Should-Retry")
"""Headers of refusals that tell clients whether and when to retry."""


class Described(NamedTuple):
    """The content of an error answer: its status and the fields of its body."""

    status: int
    kind: str
    """OpenAI's error type, or the name of the limited quantity if a tenant exceeded a limit."""
    message: str
    field: str | None
    code: str


def described(error: errors.StepwellError) -> Described:
    status, kind = _kind(error)
    if isinstance(error, errors.QuotaExceeded):
        kind = error.quota or kind
    return Described(status, kind, error.message, error.field, error.error_reason.lower())


def error_body(error: errors.StepwellError, message: str | None = None) -> dict[str, object]:
    """Returns the body of an error in OpenAI's schema. A given `message` replaces the error's
    message.
    """
    said = described(error)
    return OPENAI.body(said if message is None else said._replace(message=message))


class ErrorWriter(Hashable, Protocol):
    """Writes error bodies in one API's schema."""

    def body(self, error: Described) -> dict[str, object]:
        """Returns the body of an error."""

    def plain_body(self, status_code: int, message: str) -> dict[str, object]:
        """Returns the body of an error that has only a status and a message. An example is the
        error for an unknown path.
        """


class OpenAiErrors:
    """Writes errors in OpenAI's schema: {"error": {message, type, param, code}}."""

    def body(self, error: Described) -> dict[str, object]:
        return {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.field,
                "code": error.code,
            }
        }

    def plain_body(self, _status_code: int, message: str) -> dict[str, object]:
        kind = "invalid_request_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class AnthropicErrors:
    """Writes errors in Anthropic's schema: {"type": "error", "error": {type, message, details}}.
    `details` contains the error code.
    """

    def body(self, error: Described) -> dict[str, object]:
        """Returns the body of an error. Anthropic's schema has no key for the invalid field, so the
        message names the field.
        """
        message = error.message
        if error.field and error.field not in message:
            message = f"{error.field}: {message}"
        return self._body(error.status, message, {"error_code": error.code})

    def plain_body(self, status_code: int, message: str) -> dict[str, object]:
        return self._body(status_code, message, None)

    def _body(
        self, status_code: int, message: str, details: dict[str, str] | None
    ) -> dict[str, object]:
        is_fault_here = status_code >= _SERVER_ERROR
        kind = _ANTHROPIC_TYPES.get(
            status_code, "api_error" if is_fault_here else "invalid_request_error"
        )
        return {"type": "error", "error": {"type": kind, "message": message, "details": details}}


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
"""Maps statuses to error types. Other statuses have one of two general types, for faults of the
client or of the server.
"""

OPENAI, _ANTHROPIC = OpenAiErrors(), AnthropicErrors()


def error_writer(scope: Scope) -> ErrorWriter:
    """The error writer of the API that a request calls."""
    path = scope["path"]
    is_anthropic = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return _ANTHROPIC if is_anthropic else OPENAI


def error_response(error: errors.StepwellError, scope: Scope) -> Response:
    """The complete answer to a request that failed."""
    said = described(error)
    return Response(
        json.dumps(error_writer(scope).body(said)),
        status_code=said.status,
        headers=error_headers(error),
        media_type=MEDIA_TYPE,
    )


def error_headers(error: errors.StepwellError) -> dict[str, str]:
    """Returns headers for OpenAI's clients. They contain the time after which to retry, in whole
    seconds and in milliseconds, or that a retry would not help.
    """
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
    """The HTTP status of an error."""
    return _kind(error)[0]


def _kind(error: errors.StepwellError) -> tuple[int, str]:
    for ancestor in type(error).__mro__:
        if ancestor in KINDS:
            status, kind = KINDS[ancestor]
            return error.http_status or status, kind
    return KINDS[errors.InternalError]


def plain_error_response(status_code: int, message: str, scope: Scope) -> Response:
    """Returns an error answer with only a status and a message, for example for an unknown path.
    Stores the status's name as the error in the request's record.
    """
    record: RequestRecord = scope["state"]["record"]
    record.failed(HTTPStatus(status_code).name.lower(), message, is_failure=False)
    body = json.dumps(error_writer(scope).plain_body(status_code, message))
    return Response(body, status_code=status_code, media_type=MEDIA_TYPE)
