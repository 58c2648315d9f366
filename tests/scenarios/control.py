"""Pauses and resets of a scenario (a scripted run), by the same calls as vLLM's engine."""

from services.scheduler.core.planning.scheduler import Scheduler
from tests.scenarios.record import Record
from tests.scenarios.scenario import Pause, ResetPrefixCache


class ScenarioControl:
    """Executes pauses and resets of a scenario, and keeps the pauses that have not completed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._incomplete: list[Pause] = []

    async def begin(self, pause: Pause, record: Record) -> None:
        """Begins a pause. For mode ABORT, the caller must have aborted all requests before."""
        self._scheduler.pause(pause.mode)
        record["paused"] = pause.mode.value
        self._incomplete.append(pause)

    async def idle(self, record: Record) -> None:
        """Completes all pauses. To be called once no more steps will run."""
        incomplete, self._incomplete = self._incomplete, []
        for pause in incomplete:
            record["pause_complete"] = True
            if pause.clears:
                await self.reset(ResetPrefixCache(preempts=True), record)
                self._scheduler.reset_encoder_cache()

    def resume(self, record: Record) -> None:
        """Resumes the scheduler, even if a pause has not completed."""
        self._scheduler.resume()
        record["unpaused"] = True

    async def reset(self, reset: ResetPrefixCache, record: Record) -> None:
        """Resets the prefix cache. The scheduler refuses this while requests have blocks."""
        if reset.preempts:
            preempted = [request.request_id for request in self._scheduler.preempt_all()]
            record.setdefault("reset_preempted", []).extend(preempted)
        record.setdefault("reset", []).append(await self._scheduler.reset_prefix_cache())
