"""A refusal that is written to a connection without the application."""

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from services.gateway.adapters.http.errors import plain_error_body


def raw_refusal(status: int, message: str) -> bytes:
    """The whole answer, after which the connection is closed."""
    body = plain_error_body(message).encode()
    head = (
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return STATUS_LINE[status] + head.encode() + body
