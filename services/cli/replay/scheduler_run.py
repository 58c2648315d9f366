"""A scheduler with a pool in the same process, driven by the events of a step log."""

from collections import deque
from dataclasses import replace

from services.cli.replay.history import Abort, EndTurn, Event, GrammarCompiled, NextChunk
from services.cli.replay.statistics import RunStatistics
from services.cli.replay.step_records import StepRecords, Write
from services.common.pool.ids import RequestKey
from services.common.replica.pause_mode import PauseMode
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool


class SchedulerRun:
    def __init__(
        self, scheduler: Scheduler, pool: InProcessPool, write: Write | None = None
    ) -> None:
        """If `write` is set, it is called with each step's records (`step_records`)."""
        self.scheduler = scheduler
        self.pool = pool
        self.statistics = RunStatistics(scheduler)
        self.requests: dict[RequestKey, Request] = {}
        self.in_flight: dict[int, SchedulerOutput] = {}
        """Maps the number of each planned step without output so far to the step's plan."""
        self._write = write
        self._records: StepRecords | None = None

    async def schedule(self, now: int, *, throttled: bool) -> SchedulerOutput:
        """Plans a step. `now` is the number of steps planned before."""
        if self._write is not None and self._records is None:
            self._records = StepRecords(self.scheduler, self.requests, self._write)
        if self._records is not None:
            self._records.before_plan(self.pool.core)
        plan = await self.scheduler.schedule(throttle_prefills=throttled)
        self.statistics.planned(plan, now)
        if self._records is not None:
            self._records.planned(plan)
        return plan

    async def apply(self, event: Event, now: int) -> None:
        """Makes an event's call of the scheduler. Ignores events of unknown requests."""
        if isinstance(event, Request):
            request = as_added(event)
            self.requests[request.key] = request
            self.statistics.arrived(request, now)
            self.scheduler.add(request)
        elif isinstance(event, Abort | NextChunk | EndTurn | GrammarCompiled):
            if event.key in self.requests:
                self._apply_to(self.requests[event.key], event)
        elif isinstance(event, PauseMode):
            self.scheduler.pause(event)
        elif event == "resume":
            self.scheduler.resume()
        elif event == "reset_prefix_cache":
            await self.scheduler.reset_prefix_cache()
        elif event == "reset_encoder_cache":
            self.scheduler.reset_encoder_cache()
        elif event == "preempt_all":
            self.scheduler.preempt_all()
            self.statistics.preempted()
        else:
            self.in_flight.clear()
            self.scheduler.forget_pool()
            self.statistics.preempted()
            self.pool.reopen()

    def _apply_to(
        self, request: Request, event: Abort | NextChunk | EndTurn | GrammarCompiled
    ) -> None:
        if isinstance(event, Abort):
            self.scheduler.abort(request, event.reason)
        elif isinstance(event, NextChunk):
            self.scheduler.add_chunk(request, event.chunk)
        elif isinstance(event, GrammarCompiled):
            self.scheduler.grammar_compiled(request, event.error, event.reason)
        elif request.context is not None:
            self.scheduler.end_turn(request.context, event.tool, ends=event.ends)


def as_added(request: Request) -> Request:
    """Copies a request that was not scheduled yet, so that a scheduler can accept the copy."""
    return replace(
        request,
        token_ids=list(request.token_ids),
        draft_token_ids=[],
        block_hashes=[],
        chunks=deque(),
    )
