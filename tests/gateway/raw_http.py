"""HTTP requests as bytes, for clients that do what no library does."""


def post_head(path: str, num_bytes: int, *headers: str, version: str = "1.1") -> bytes:
    """The head of a POST of so many bytes of JSON."""
    lines = (
        f"POST {path} HTTP/{version}",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {num_bytes}",
        *headers,
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """A whole POST of JSON."""
    return post_head(path, len(body), *headers, version=version) + body
