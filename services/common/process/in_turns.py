import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


async def in_turns(work: Generator[None, None, T]) -> T:
    """Returns the result of a generator. Other tasks can run whenever it yields."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            value: T = end.value
            return value
        await asyncio.sleep(0)
