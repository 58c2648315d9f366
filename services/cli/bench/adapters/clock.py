import asyncio
import time


class RunClock:
    """A monotonic `Clock`, which starts at 0 when it is created and again at `start`."""

    def __init__(self) -> None:
        self._start = 0.0
        self.start()

    def start(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def sleep_until(self, seconds: float) -> None:
        """Sleeps until the clock reaches `seconds`, and never returns earlier."""
        while (left := seconds - self.now()) > 0:  # noqa: ASYNC110 - only time passes
            await asyncio.sleep(left)
