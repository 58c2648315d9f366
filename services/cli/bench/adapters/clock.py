"""The clock of a load."""

import asyncio
import time


class RunClock:
    """A `Clock` of the load's core: monotonic, and 0 when it was made or started."""

    def __init__(self) -> None:
        self._start = 0.0
        self.start()

    def start(self) -> None:
        """Counts from now on."""
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def sleep_until(self, seconds: float) -> None:
        """Never returns before that time."""
        while (left := seconds - self.now()) > 0:  # noqa: ASYNC110 - only time passes
            await asyncio.sleep(left)
