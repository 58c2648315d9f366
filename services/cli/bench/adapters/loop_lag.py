"""Measures whether the load generator keeps up, by its processor time and its event loop's lag."""

import asyncio
import time
from dataclasses import dataclass

from services.cli.bench.core.percentiles import Distribution, distribution

_EVERY_SECONDS = 0.01
MAX_LAG_MS = 10.0
MAX_PROCESSOR_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class GeneratorUsage:
    """The load generator's resource use in one run. `processor_share` is a fraction of one
    processor. `loop_lag_ms` is the delay of the event loop's timers, in milliseconds.
    """

    processor_share: float
    loop_lag_ms: Distribution | None

    @property
    def warning(self) -> str | None:
        """A warning that the load generator may have limited the results, or None."""
        lag = self.loop_lag_ms.percentiles[99] if self.loop_lag_ms else 0.0
        if self.processor_share > MAX_PROCESSOR_SHARE:
            share = f"{100 * self.processor_share:.0f} % of a processor"
            return (
                f"the load generator used {share}, the most that one process can, and limited "
                "the load"
            )
        if lag > MAX_LAG_MS:
            return (
                f"the generator's event loop lagged by {lag:.0f} ms (p99): it, or what it shares "
                "the machine with, delayed what was measured"
            )
        return None


class LoopLag:
    """Measures the load generator's usage during an `async with` block."""

    def __init__(self) -> None:
        self._lags_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._processor_seconds = 0.0
        self._seconds = 0.0

    async def __aenter__(self) -> "LoopLag":
        self._processor_seconds = -time.process_time()
        self._seconds = -time.perf_counter()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._processor_seconds += time.process_time()
        self._seconds += time.perf_counter()
        if self._task is not None:
            self._task.cancel()

    def usage(self) -> GeneratorUsage:
        """Returns the measurements. Call it after the `async with` block."""
        return GeneratorUsage(
            processor_share=self._processor_seconds / max(self._seconds, 1e-9),
            loop_lag_ms=distribution(self._lags_ms),
        )

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + _EVERY_SECONDS
            await asyncio.sleep(_EVERY_SECONDS)
            self._lags_ms.append(max(time.perf_counter() - due, 0.0) * 1000)
