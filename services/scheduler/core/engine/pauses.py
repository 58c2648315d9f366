"""Pauses of the engine that operators request."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import Aborted
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.scheduler.core.engine.engine_lock import EngineLock, to_its_end
from services.scheduler.core.engine.pending_changes import PendingChanges
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.ports import PoolLost, StepObserver


@dataclass(eq=False)
class Pauses:
    """Begins and ends pauses of the engine between two iterations of its loop. A pause that began
    while a step is planned would affect only some of the step's requests.
    """

    scheduler: Scheduler
    changes: PendingChanges
    observer: StepObserver
    lock: EngineLock
    wake: asyncio.Event
    on_lost: Callable[[PoolLost], None]
    """Makes the engine open the pool again."""

    @property
    def is_on(self) -> bool:
        """Whether a pause prevents steps. In mode WAIT, steps continue until no request runs."""
        mode = self.scheduler.pause_mode
        return mode is not None and not (mode is PauseMode.WAIT and self.scheduler.running)

    async def begin(self, mode: PauseMode) -> None:
        """Begins a pause, with the effects described in `EngineCore.pause`."""
        if mode is PauseMode.WAIT:
            await self._finish_running()
        else:
            async with self.lock:
                self.scheduler.pause(mode)
        self.observer.paused()
        async with self.lock.standstill():
            self.changes.apply()
            if mode is PauseMode.ABORT:
                self.changes.end(dict.fromkeys(self.scheduler.requests, FinishReason.ABORT))
            try:
                await to_its_end(self.scheduler.flush())
            except PoolLost as lost:
                self.on_lost(lost)

    async def _finish_running(self) -> None:

        def is_over() -> bool:
            return self.scheduler.pause_mode is not PauseMode.WAIT or not self.scheduler.running

        async with self.lock:
            self.scheduler.pause(PauseMode.WAIT)
            self.wake.set()
            await self.lock.until(is_over)
        if self.scheduler.pause_mode is None:
            raise Aborted("the engine was resumed while requests ran", reason="RESUMED")

    async def end(self) -> None:
        async with self.lock:
            self.scheduler.resume()
        self.observer.resumed()
        self.wake.set()
