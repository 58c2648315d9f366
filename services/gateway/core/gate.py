"""Limits the number of concurrent requests, and waits until none is in progress."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import ResourceExhausted, Unavailable


class Gate:
    """Counts requests in progress. When the gate is full or closed, it refuses new requests.
    `is_open` is false from the beginning of the drain, which may be before the gate is closed.
    """

    def __init__(self, max_concurrent_requests: int) -> None:
        self._max = max_concurrent_requests
        self.inside = 0
        self.is_open = True
        self._is_closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    def check(self) -> None:
        """Raises ResourceExhausted if the gate is full, and Unavailable if it is closed."""
        if self._is_closed:
            raise Unavailable("the server is shutting down", retry_after_seconds=1.0)
        if self.inside >= self._max:
            raise ResourceExhausted(
                f"the server already serves {self._max} requests, the most at once; try again "
                "later",
                reason="TOO_MANY_CONCURRENT_REQUESTS",
                retry_after_seconds=1.0,
            )

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Counts a request while the `with` block runs. Raises the errors of `check`."""
        self.check()
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if self.inside == 0:
                self._empty.set()

    def begin_drain(self) -> None:
        """Still admits new requests."""
        self.is_open = False

    def close(self) -> None:
        """Refuses new requests from now on. Idempotent."""
        self.is_open, self._is_closed = False, True

    async def empty(self) -> None:
        """Waits until no request is in progress."""
        await self._empty.wait()
