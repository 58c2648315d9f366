"""Waits for conditions, with a deadline."""

import asyncio
import time
from collections.abc import Callable

SECONDS = 60.0


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Waits until a condition holds. Fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def wait_for(
    condition: Callable[[], object], seconds: float = SECONDS, period: float = 0.02
) -> float:
    """Polls a condition until it holds. The first polls are `period` seconds apart, later ones
    farther, because polls take processor time from the services. Returns the elapsed time. Fails
    after `seconds`.
    """
    began, pause = time.monotonic(), period
    while not condition():
        assert time.monotonic() < began + seconds, f"not within {seconds} s"
        time.sleep(pause)
        pause = min(1.2 * pause, 5 * period)
    return time.monotonic() - began
