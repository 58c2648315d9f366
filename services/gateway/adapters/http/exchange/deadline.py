"""The deadline of an HTTP request: the header X-Request-Timeout, in seconds."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)

from services.common.errors import DeadlineExceeded, InvalidArgument, StepwellError

HEADER = "X-Request-Timeout"
MAX_SECONDS = 86_400.0


def deadline_of(headers: Mapping[str, str], arrived: int) -> float | None:
    """Returns the time, on the event loop's clock, at which the client stops waiting, or None if
    the request has no X-Request-Timeout. `arrived` is the request's arrival in nanoseconds of
    `time.perf_counter_ns`.

    Raises InvalidArgument if the header's value is not a number of seconds above 0 and at most a
    day.
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


def until(deadline: float | None) -> AbstractAsyncContextManager[None]:
    """Cancels the `async with` block at the deadline, and then raises DeadlineExceeded."""
    return nullcontext() if deadline is None else _until(deadline)


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    alarm = asyncio.timeout_at(deadline)
    try:
        async with alarm:
            yield
    except TimeoutError as error:
        if not alarm.expired():
            raise
        raise _exceeded() from error


def ending_at(
    deadline: float | None, end: Callable[[StepwellError], None]
) -> AbstractContextManager[None]:
    """Calls `end` with DeadlineExceeded if the deadline passes while the `with` block runs."""
    return nullcontext() if deadline is None else _ending_at(deadline, end)


@contextmanager
def _ending_at(deadline: float, end: Callable[[StepwellError], None]) -> Iterator[None]:
    timer = asyncio.get_running_loop().call_at(deadline, lambda: end(_exceeded()))
    try:
        yield
    finally:
        timer.cancel()


def _exceeded() -> DeadlineExceeded:
    return DeadlineExceeded(f"the time limit of {HEADER} passed before the answer was complete")
