"""Long computations on an event loop."""

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


async def in_turns(work: Generator[None, None, T]) -> T:
    """What work returns; other tasks get a turn where it yields."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            value: T = end.value
            return value
        await asyncio.sleep(0)
