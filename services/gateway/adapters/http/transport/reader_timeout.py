"""Notices HTTP clients that have stopped reading their answer."""

import asyncio
from collections.abc import Callable

LEAST_BYTES = 16 * 1024
"""Number of bytes that a client must read within the timeout, if at least that many are unsent."""


class ReaderTimeout:
    """Watches the write buffer of a connection, which has the bytes that the client has not read.

    In each period of `timeout_seconds` the client must read LEAST_BYTES, or the rest of the buffer.
    Otherwise `on_timeout` is called, even if the request has ended and only the rest of its answer
    is unsent.
    """

    def __init__(
        self, transport: asyncio.Transport, timeout_seconds: float, on_timeout: Callable[[], None]
    ) -> None:
        # The transport calls `pause_writing` when more than LEAST_BYTES are unsent, and
        # `resume_writing` when the buffer is empty.
        transport.set_write_buffer_limits(high=LEAST_BYTES, low=0)
        self._transport = transport
        self._timeout = timeout_seconds
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        self._num_unsent = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the timer, because the write buffer is above its limit."""
        self._num_unsent = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._timeout, self._check)

    def stop(self) -> None:
        """Stops the timer, because the buffer is empty or the connection has ended. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        before = self._num_unsent
        if self._transport.get_write_buffer_size() <= before - LEAST_BYTES:
            self.start()
        else:
            self._on_timeout()
