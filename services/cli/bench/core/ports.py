"""The ports of a load: the server, a clock, and an observer."""

from typing import Any, Protocol

from services.cli.bench.core.record import RequestRecord


class Server(Protocol):
    def encode(self, fields: dict[str, Any], output_len: int) -> bytes:
        """Encodes a request from `prompt` or `messages` and the length of the answer."""
        ...

    async def send(self, request: bytes, record: RequestRecord, *, keep_answer: bool) -> str | None:
        """Sends a request and waits for its end. Writes times, counts and failure into `record`.
        Returns the text of the answer if `keep_answer` is set, or None if the request failed.
        """
        ...


class Clock(Protocol):
    """A clock that counts seconds since the start of the load."""

    def now(self) -> float: ...

    async def sleep_until(self, seconds: float) -> None:
        """Returns at that time, or at once if the time has passed."""
        ...


class Observer(Protocol):
    """Is notified of requests while the load runs."""

    def began(self, record: RequestRecord) -> None:
        """Called just before a request is sent."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """Called when a request was answered or has failed."""
        ...
