"""Errors as OpenAI's API writes them: a status and {"error": {message, type, param, code}}."""

import json
import math

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from services.common import errors

# Kinds by status and OpenAI's type; the nearest class in an error's ancestry counts.
KINDS: dict[type[errors.StepwellError], tuple[int, str]] = {
    errors.InvalidArgument: (400, "invalid_request_error"),
    errors.OutOfRange: (400, "invalid_request_error"),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.NotFound: (404, "not_found_error"),
    errors.FailedPrecondition: (409, "conflict_error"),
    errors.PayloadTooLarge: (413, "invalid_request_error"),
    errors.ResourceExhausted: (429, "rate_limit_error"),
    errors.InternalError: (500, "server_error"),
    errors.DeadlineExceeded: (504, "timeout_error"),
    errors.Aborted: (503, "service_unavailable_error"),
    errors.Unavailable: (503, "service_unavailable_error"),
}


def error_body(error: errors.StepwellError) -> dict[str, object]:
    return {
        "error": {
            "message": error.message,
            "type": _kind(error)[1],
            "param": error.field,
            "code": error.error_reason.lower(),
        }
    }


def error_response(error: errors.StepwellError) -> Response:
    """The whole answer, with a Retry-After in whole seconds where trying again helps."""
    headers = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        json.dumps(error_body(error)),
        status_code=_kind(error)[0],
        headers=headers,
        media_type="application/json",
    )


def _kind(error: errors.StepwellError) -> tuple[int, str]:
    for ancestor in type(error).__mro__:
        if ancestor in KINDS:
            return KINDS[ancestor]
    return KINDS[errors.InternalError]


def plain_error_response(status_code: int, message: str) -> Response:
    """The answer to what was not understood far enough to be one of these errors."""
    body = _plain_error_body(message)
    return Response(body, status_code=status_code, media_type="application/json")


def raw_refusal(status: int, message: str) -> bytes:
    """Such an answer without an application, after which the connection is closed."""
    body = _plain_error_body(message).encode()
    head = (
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return STATUS_LINE[status] + head.encode() + body


def _plain_error_body(message: str) -> str:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return json.dumps({"error": error})
