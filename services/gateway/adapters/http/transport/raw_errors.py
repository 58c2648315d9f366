"""Error answers as bytes, for connections that write them without the application."""

import json
from collections.abc import Iterable
from functools import lru_cache

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from services.common.errors import StepwellError
from services.gateway.adapters.http.exchange import errors

_KEPT_BODIES = 256


def raw_error_response(
    error: StepwellError, scope: Scope, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Returns the bytes of a complete error answer. `headers` are added to the error's own headers.
    The connection stays open.
    """
    said = errors.described(error)
    fixed, body = _encoded(errors.error_writer(scope), said)
    own = "".join(
        [f"{name.lower()}: {value}\r\n" for name, value in errors.error_headers(error).items()]
    )
    further = [b"%b: %b\r\n" % header for header in headers]
    return b"".join([STATUS_LINE[said.status], *further, fixed, own.encode(), b"\r\n", body])


@lru_cache(maxsize=_KEPT_BODIES)
def _encoded(write: errors.ErrorBody, error: errors.Described) -> tuple[bytes, bytes]:
    """Returns the headers that describe an error's body, and the body. Results are cached, because
    most refusals under overload are identical.
    """
    body = json.dumps(write(error)).encode()
    return _headers(body).encode(), body


def raw_refusal(status: int, message: str) -> bytes:
    """Returns the bytes of an error answer to a request that was not read far enough to know its
    API. The schema is OpenAI's. The connection must be closed after this answer.
    """
    body = json.dumps(errors.openai_body(errors.plain(status, message))).encode()
    head = f"{_headers(body)}connection: close\r\n\r\n"
    return STATUS_LINE[status] + head.encode() + body


def _headers(body: bytes) -> str:
    return f"content-length: {len(body)}\r\ncontent-type: {errors.MEDIA_TYPE}\r\n"
