"""The interfaces that a load uses: the server, a clock, and an observer."""

from typing import Any, Protocol

from services.cli.bench.core.record import RequestRecord


class Server(Protocol):
    def encode(self, fields: dict[str, Any], output_len: int) -> bytes:
        """Encodes a request from fields, such as `prompt` or `messages`, and the output length."""
        ...

    async def send(self, request: bytes, record: RequestRecord, *, keep_answer: bool) -> str | None:
        """Sends a request and waits for its end. Writes times, counts and failure into `record`.
        Returns None if the request failed, otherwise the output text, which may be empty without
        `keep_answer`.
        """
        ...


class Clock(Protocol):
    """A clock that counts seconds since the start of the load."""

    def now(self) -> float: ...

    async def sleep_until(self, seconds: float) -> None:
        """Waits until that time. Returns at once if it has passed."""
        ...


class Observer(Protocol):
    """Receives notifications of requests while the load runs."""

    def began(self, record: RequestRecord) -> None:
        """Called just before a request is sent."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """This method is called when a request has succeeded or failed."""
        ...
