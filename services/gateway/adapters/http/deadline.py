"""The deadline of an HTTP request: the header X-Request-Timeout, in seconds."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from services.common.errors import DeadlineExceeded, InvalidArgument

T = TypeVar("T")

HEADER = "X-Request-Timeout"
MAX_SECONDS = 86_400.0


def deadline_of(headers: Mapping[str, str], arrived: int) -> float | None:
    """When the client of a request gives up, on the event loop's clock; None without the header.
    The request arrived at that time in nanoseconds of `time.perf_counter_ns`.

    Raises InvalidArgument for what is no number of seconds above 0, a day at most.
    """
    value = headers.get(HEADER.lower())
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidArgument(
            f"{HEADER} must be a number of seconds above 0 and at most {MAX_SECONDS:.0f}",
            field=HEADER,
        )
    seconds -= (time.perf_counter_ns() - arrived) / 1e9
    return asyncio.get_running_loop().time() + seconds


@asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """Cancels what runs inside at the deadline, and raises DeadlineExceeded then."""
    alarm = asyncio.timeout_at(deadline)
    try:
        async with alarm:
            yield
    except TimeoutError as error:
        if not alarm.expired():
            raise
        raise _exceeded() from error


async def each_until(deadline: float, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The items, each of which must come before the deadline; raises DeadlineExceeded then. What is
    done with one between them is not cut off: an event that is being written is written whole.

    One timer serves all items, since this is each token's path.
    """
    alarm = _Alarm(deadline)
    try:
        async with aclosing(items):
            while not alarm.has_rung:
                try:
                    yield await alarm.unless_it_rings(items)
                except StopAsyncIteration:
                    return
            raise _exceeded()
    finally:
        alarm.stop()


class _Alarm:
    """Cancels the wait of the present task for an item at a given time."""

    def __init__(self, when: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.has_rung = False
        self._task = task
        self._num_cancels_before = task.cancelling()
        self._is_waiting = False
        self._timer = asyncio.get_running_loop().call_at(when, self._ring)

    async def unless_it_rings(self, items: AsyncGenerator[T, None]) -> T:
        """The next item. Raises StopAsyncIteration at the end, DeadlineExceeded at the time."""
        self._is_waiting = True
        try:
            return await anext(items)
        except asyncio.CancelledError as error:
            if self.has_rung and self._task.uncancel() <= self._num_cancels_before:
                raise _exceeded() from error
            raise
        finally:
            self._is_waiting = False

    def stop(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        self.has_rung = True
        if self._is_waiting:
            self._task.cancel()


def _exceeded() -> DeadlineExceeded:
    return DeadlineExceeded(f"the time that {HEADER} allows passed before the answer was complete")
