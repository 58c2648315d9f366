"""The deadline of an HTTP request: the header X-Request-Timeout, in seconds."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from services.common.errors import DeadlineExceeded, InvalidArgument

T = TypeVar("T")

HEADER = "X-Request-Timeout"
MAX_SECONDS = 86_400.0


def deadline_of(headers: Mapping[str, str]) -> float | None:
    """When the client gives up, on the event loop's clock; None without the header.

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
        raise DeadlineExceeded(
            f"the time that {HEADER} allows passed before the answer was complete"
        ) from error


async def each_until(
    deadline: float | None, items: AsyncGenerator[T, None]
) -> AsyncGenerator[T, None]:
    """The items, each of which must come before the deadline. What is done with one between them
    is not cut off: an event that is being written is written whole.
    """
    async with aclosing(items):
        while True:
            async with until(deadline):
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            yield item
