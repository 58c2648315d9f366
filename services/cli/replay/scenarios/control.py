"""Pauses and resets of a scenario, as vLLM's engine makes them of calls of its scheduler."""

from services.cli.replay.record import Record
from services.cli.replay.scenarios.scenario import Pause, ResetPrefixCache
from services.scheduler.core.planning.scheduler import Scheduler


class ScenarioControl:
    """The engine's state besides its scheduler: pauses that are not complete yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._incomplete: list[Pause] = []

    async def begin(self, pause: Pause, record: Record) -> None:
        """Begins a pause. The caller has ended the requests that it ends."""
        self._scheduler.pause(pause.mode)
        record["paused"] = pause.mode.value
        self._incomplete.append(pause)

    async def idle(self, record: Record) -> None:
        """Completes the pauses, for nothing is left to do in them."""
        incomplete, self._incomplete = self._incomplete, []
        for pause in incomplete:
            record["pause_complete"] = True
            if pause.clears:
                await self.reset(ResetPrefixCache(preempts=True), record)
                self._scheduler.reset_encoder_cache()

    def resume(self, record: Record) -> None:
        """Ends a pause, complete or not."""
        self._scheduler.resume()
        record["unpaused"] = True

    async def reset(self, reset: ResetPrefixCache, record: Record) -> None:
        """Forgets every cached prefix, unless blocks are held."""
        if reset.preempts:
            preempted = [request.request_id for request in self._scheduler.preempt_all()]
            record.setdefault("reset_preempted", []).extend(preempted)
        record.setdefault("reset", []).append(await self._scheduler.reset_prefix_cache())
