"""Ends connections whose client has stopped reading its answer."""

import asyncio
from collections.abc import Callable

# What a client must take in the time that it has, where more than that waits for it.
_LEAST_BYTES = 16 * 1024


class UnreadAnswer:
    """Watches what was written to a connection and is not sent, since the client does not read.

    In each `timeout_seconds` the client must take 16 KiB or all there is. Otherwise `on_cut` is
    called and the connection aborted, with or without a request on it.
    """

    def __init__(
        self, transport: asyncio.Transport, timeout_seconds: float, on_cut: Callable[[], None]
    ) -> None:
        # An event that is about to be sent is not reported; more than a few are, until all is sent.
        transport.set_write_buffer_limits(high=_LEAST_BYTES, low=0)
        self._transport = transport
        self._timeout = timeout_seconds
        self._on_cut = on_cut
        self._loop = asyncio.get_running_loop()
        self._num_unsent = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """More than a little waits to be sent."""
        self._num_unsent = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._timeout, self._look)

    def end(self) -> None:
        """All is sent, or the connection has ended. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        before = self._num_unsent
        if self._transport.get_write_buffer_size() <= before - _LEAST_BYTES:
            self.begin()
        else:
            self._on_cut()
            self._transport.abort()
