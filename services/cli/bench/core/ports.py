"""What a load needs of the world: a server to ask, a clock, and a watcher."""

from typing import Any, Protocol

from services.cli.bench.core.record import RequestRecord


class Server(Protocol):
    """The server under load."""

    def encode(self, fields: dict[str, Any], output_len: int) -> bytes:
        """A request as it will be sent, for `prompt` or `messages` and the length of the answer."""
        ...

    async def send(self, request: bytes, record: RequestRecord, *, keep_answer: bool) -> str | None:
        """Sends a request and waits for its end; writes times, counts and failure into `record`.

        Returns the text of the answer, for which `keep_answer` must be set; None if it failed.
        """
        ...


class Clock(Protocol):
    """Seconds since the start of the load."""

    def now(self) -> float:
        """The time."""
        ...

    async def sleep_until(self, seconds: float) -> None:
        """Returns at that time, at once if it has passed."""
        ...


class Observer(Protocol):
    """Sees requests while the load runs."""

    def began(self, record: RequestRecord) -> None:
        """A request is about to be sent."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A request has its answer, or has failed."""
        ...
