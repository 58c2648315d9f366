import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Self

from services.common.errors import Aborted


class StreamReaderTimeout:
    """Ends a stream's request if the client reads no message for `timeout_seconds`.

    The object is a context for the duration of the stream. Call `sending` before each write, and
    `sent` after it. These calls only set attributes, which a timer checks at intervals. On a
    timeout, `work` is closed at once with an error, so the sequences are aborted and the request
    leaves the gate. The gRPC call itself cannot end during a write. If the client reads again, it
    receives the messages that were sent before, and then the error, which `sent` raises.
    """

    def __init__(
        self, work: AsyncExitStack, timeout_seconds: float, on_timeout: Callable[[], None]
    ) -> None:
        self._work = work
        self._timeout = timeout_seconds
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        self._sending_since: float | None = None
        self._sending_began = 0
        self._error: Aborted | None = None
        self._ending: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._timeout, self._check_client)
        return self

    def __exit__(self, *_error: object) -> None:
        self._timer.cancel()

    def sending(self) -> None:
        self._sending_since = self._loop.time()
        self._sending_began = time.perf_counter_ns()

    def sent(self) -> int:
        """Marks the message as written. Returns the duration of the write in nanoseconds. Raises
        Aborted if the stream has timed out.
        """
        self._sending_since = None
        if self._error is not None:
            raise self._error
        return time.perf_counter_ns() - self._sending_began

    def _check_client(self) -> None:
        now = self._loop.time()
        since = now if self._sending_since is None else self._sending_since
        if now - since < self._timeout:
            self._timer = self._loop.call_at(since + self._timeout, self._check_client)
            return
        self._on_timeout()
        self._error = Aborted(
            f"the client read no message for {self._timeout:g} s", reason="READER_TOO_SLOW"
        )
        self._ending = asyncio.create_task(self._end(self._error))

    async def _end(self, error: Aborted) -> None:
        with suppress(Aborted):
            await self._work.__aexit__(Aborted, error, None)
