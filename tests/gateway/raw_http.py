"""Builds HTTP requests from bytes, for clients that behave as no HTTP library does."""


def post_head(path: str, num_bytes: int, *headers: str, version: str = "1.1") -> bytes:
    lines = (
        f"POST {path} HTTP/{version}",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {num_bytes}",
        *headers,
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    return post_head(path, len(body), *headers, version=version) + body


def unchunked(response: bytes) -> bytes:
    """The body of a chunked response, as far as it has arrived."""
    body, rest = b"", response.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body
