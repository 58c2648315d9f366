"""The engine loop: plans steps, sends them to the workers, and applies their outputs."""

import asyncio
import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain

from services.common.errors import FailedPrecondition, Unavailable
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.scheduler.core import ports
from services.scheduler.core.engine.batch_queue import BatchQueue
from services.scheduler.core.engine.engine_lock import EngineLock, to_its_end
from services.scheduler.core.engine.pauses import Pauses
from services.scheduler.core.engine.pending_changes import PendingChanges
from services.scheduler.core.engine.planning_clock import PlanningClock
from services.scheduler.core.engine.recovery import Recovery
from services.scheduler.core.output import EngineCoreOutputs, PreemptionCause
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request, RequestStatus

logger = logging.getLogger(__name__)

LINGER_SECONDS = 0.01
"""Delay before the blocks and batch rows of the last requests are freed in a separate step. If a
client sends one request after another, the next request arrives during the delay. Its first step
then frees them, which saves a step and a transaction with the pool.
"""
RETRY_SECONDS = 0.001
"""Delay before planning is tried again if no request could be scheduled and no step is in flight.
The requests then wait for an external event, such as the end of a KV transfer. As in vLLM.
"""
SWEEP_SECONDS = 0.5
"""Interval at which an idle engine plans a step to free blocks that the policy has kept for ended
requests for long enough.
"""


class EngineState(enum.Enum):
    IDLE = "idle"
    RUNNING = "running"
    PAUSED = "paused"
    RECOVERING = "recovering"


class EngineCore:
    """Runs the engine loop of one scheduler. Only iterations of `run`, and code in a `standstill`
    between two iterations, change the scheduler. Other code adds and ends requests by `changes`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: ports.Executor,
        replica: ports.PoolAndWorkers,
        delivery: ports.Delivery,
        observer: ports.StepObserver,
        readiness: ports.Readiness,
        now: Callable[[], float],
        linger_seconds: float = LINGER_SECONDS,
    ) -> None:
        """`now` returns the time of a monotonic clock, in seconds."""
        self.scheduler = scheduler
        self.state = EngineState.IDLE
        self.state_reason = ""
        self._delivery = delivery
        self._observer = observer
        self._readiness = readiness
        self._awaits_sessions = False
        """Whether the last step was empty because sessions (requests with several turns) that wait
        for input occupy the batch rows or blocks. Planning is then useless until a change arrives.
        """
        self._batch_queue = BatchQueue(executor, scheduler.config.num_steps_in_flight, now)
        self._undelivered: EngineCoreOutputs | None = None
        self._linger_seconds = linger_seconds
        self._wake = asyncio.Event()
        self.changes = PendingChanges(
            scheduler, observer, self._batch_queue, self._wake, self._report_ended
        )
        self._lock = EngineLock(self._wake, lambda: bool(self._batch_queue))
        self._pauses = Pauses(scheduler, self.changes, observer, self._lock, self._wake, self.lost)
        self._lost: ports.PoolLost | ports.WorkersLost | None = None
        self._recovery = Recovery(
            scheduler, replica, self.changes, observer, self._lock, self._wake
        )
        self.losses = self._recovery.losses
        self._has_stages = scheduler.config.pipeline_parallel_size > 1

    @property
    def planning(self) -> PlanningClock:
        return self._batch_queue.planning

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for an admission."""
        return len(self.scheduler.queues) + len(self.changes.arrivals)

    @property
    def unfinished(self) -> list[Request]:
        return [*self.scheduler.requests, *self.changes.arrivals]

    def abort_late(self, now: float) -> None:
        """Ends waiting requests whose `latest_start` has passed without a first admission."""
        late = [
            request
            for request in self.unscheduled()
            if request.latest_start is not None and request.latest_start <= now
        ]
        if late:
            self.changes.abort(late, FinishReason.QUEUE_TIMEOUT)

    def unscheduled(self) -> Iterator[Request]:
        """Waiting requests that were never admitted."""
        waiting = chain(self.scheduler.queues, self.changes.arrivals)
        return (request for request in waiting if request.num_cached_tokens is None)

    def lost(self, lost: ports.PoolLost | ports.WorkersLost) -> None:
        """Records a loss of the pool or the workers that was detected outside a step."""
        self._lost = lost
        self._wake.set()

    async def run(self) -> None:
        """Runs steps until cancelled. Reopens a lost pool or lost workers. Raises other errors."""
        try:
            while True:
                try:
                    await self._until_work()
                    if not self._has_stages:
                        await self._batch_queue.until_due()
                    async with self._lock:
                        await self._turn()
                except (ports.PoolLost, ports.WorkersLost) as lost:
                    await self._recover(lost)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # a task group would ignore the error
                raise RuntimeError("a call that the engine awaited was cancelled") from error
            raise
        finally:
            self._batch_queue.drop()
            self._observer.stopped()

    async def pause(self, mode: PauseMode) -> None:
        """Stops planning steps. Returns when no step is in flight and the blocks of ended requests
        are free. Mode ABORT first ends all requests. Mode WAIT admits no more requests, waits until
        the running requests have ended, and raises Aborted if `resume` is called before that.
        """
        await self._pauses.begin(mode)
        if self.state is not EngineState.RECOVERING:
            self.state = EngineState.PAUSED

    async def resume(self) -> None:
        await self._pauses.end()

    async def reset_prefix_cache(
        self, *, preempt_running: bool, reset_connector: bool = False
    ) -> None:
        """Removes every cached prefix and, with `reset_connector`, everything that the KV connector
        has stored. Raises FailedPrecondition if requests hold blocks. To avoid that,
        `preempt_running` first preempts all running requests. Raises Unavailable while a lost pool
        or lost workers are reopened.
        """
        async with self.standstill():
            if self.state is EngineState.RECOVERING:
                raise Unavailable(self.state_reason)
            if preempt_running:
                preempted = self.scheduler.preempt_all()
                self._observer.preempted(preempted, PreemptionCause.RESET)
            try:
                was_reset = await to_its_end(self.scheduler.reset_prefix_cache())
            except ports.PoolLost as lost:
                self.lost(lost)
                raise
            if not was_reset:
                raise FailedPrecondition(
                    "the prefix cache was not reset, because requests still use blocks",
                    reason="BLOCKS_IN_USE",
                )
            if reset_connector and self.scheduler.transfers is not None:
                self.scheduler.transfers.reset_cache()

    def standstill(self) -> AbstractAsyncContextManager[None]:
        """A context manager. Within it, the loop is stopped between two iterations, and no step is
        in flight. The caller may be cancelled.
        """
        return self._lock.standstill()

    async def _turn(self) -> None:
        """One iteration: adds and ends requests, plans and sends a step, and applies the output of
        the oldest step in flight. With asynchronous scheduling, a step is planned shortly before
        the previous step ends, so that it includes requests that arrive until then. During a pause,
        no step is planned, but the blocks of ended requests are freed.
        """
        self.changes.apply()
        planned = False
        if self._may_plan() and (self.scheduler.has_work or self.scheduler.holds_ended):
            traceparent = self._observer.begin()
            plan = await self.scheduler.schedule(traceparent)
            self._observer.planned(plan)
            planned = bool(plan.requests)
            if plan.is_sent:
                await self._batch_queue.send(plan, traceparent)
            elif not self._batch_queue:
                self._awaits_sessions = self.scheduler.is_held_up_by_sessions(plan)
        elif self._pauses.is_on:
            await self.scheduler.flush()
        if self._batch_queue and (self._batch_queue.is_full or not planned):
            must_wait = not self._has_stages or self._batch_queue.is_full
            if must_wait or await self._batch_queue.is_answered(self._wake, self._has_change):
                await self._complete()
        elif failed := self.scheduler.end_failed():
            self._report_ended(failed)
        elif not planned and (self.scheduler.has_requests or self.scheduler.queues.admitted_only):
            await asyncio.sleep(RETRY_SECONDS)

    def _has_change(self) -> bool:
        """Whether a change (such as a new request) is pending, and no pause prevents planning."""
        return bool(self.changes) and not (self._pauses.is_on or self._lock.is_held)

    async def _complete(self) -> None:
        """Waits for the output of the oldest step and applies it. The step's tokens are delivered
        while the loop next waits for the pool or the workers, so that delivery delays no step.
        """
        plan, output = await self._batch_queue.take_answer()
        self.changes.apply()
        self._deliver()
        update = self._undelivered = self.scheduler.update_from_output(plan, output)
        if self.losses.is_in_a_row:
            self._recovery.step_done(plan)
        asyncio.get_running_loop().call_soon(self._deliver)
        self._observer.done(plan, update)
        awaiting = RequestStatus.WAITING_FOR_CHUNK
        if update.turns and (begun := [one for one in update.turns if one.status is not awaiting]):
            self._observer.arrived(begun)

    def _deliver(self) -> None:
        """Delivers the last step's outputs, if they were not delivered yet. If the delivery raises
        an error, the next call delivers them again, so that the engine loop raises the error.
        """
        if self._undelivered is not None:
            self._delivery.deliver(self._undelivered)
            self._undelivered = None

    def _report_ended(self, ended: Sequence[Request]) -> None:
        self._observer.ended(ended)
        self._deliver()
        self._delivery.deliver_ends(ended)

    async def _until_work(self) -> None:
        while not (self.changes or self._batch_queue) and (
            self._pauses.is_on
            or self._lock.is_held
            or self._awaits_sessions
            or not (self.scheduler.has_work or self.scheduler.queues.admitted_only)
        ):
            self.state = EngineState.PAUSED if self._pauses.is_on else EngineState.IDLE
            self._deliver()
            if self._lost is not None:
                raise self._lost
            if self.scheduler.holds_ended:
                await self._until_woken(SWEEP_SECONDS)
                break
            self._wake.clear()
            await self._wake.wait()
            self._awaits_sessions = False
        self._awaits_sessions = False
        self.state = EngineState.RUNNING
        if not (self.scheduler.running or self._batch_queue or self.changes):
            await self._linger()

    async def _linger(self) -> None:
        """If the next step would only free blocks and rows, waits a short time for a request."""
        if self.scheduler.only_frees:
            await self._until_woken(self._linger_seconds)

    async def _until_woken(self, seconds: float) -> None:
        self._wake.clear()
        timer = asyncio.get_running_loop().call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def _recover(self, lost: ports.PoolLost | ports.WorkersLost) -> None:
        """Reopens the pool and the workers, which are then empty. Requests keep their tokens."""
        logger.warning("%s; recovering", lost.message)
        self.state, self.state_reason = EngineState.RECOVERING, lost.message
        self._readiness.not_ready(lost.message)
        async with self._lock:
            failed = self._batch_queue.drop()
            if isinstance(lost, ports.PoolLost):
                failed = [self._recovery.plan_of(lost.suspects)]
            preempted = self.scheduler.forget_pool()
            self._observer.lost(preempted, lost)
            self.losses.note(lost)
            self._recovery.steps_failed(failed)
            self._recovery.begin_trial()
        self._lost, self._awaits_sessions = None, False
        await self._recovery.reopen()
        self._observer.recovered()
        self.state_reason = ""
        self._readiness.ready()
        logger.info(
            "the kvpool and the workers are open again; %d preempted requests are computed again",
            len(preempted),
        )

    def _may_plan(self) -> bool:
        """Whether a step may be planned. If the fault search (for a request whose steps always
        fail) now allows a different set of requests to run, this preempts all requests once no step
        is in flight, so that only the requests of the set are admitted again.
        """
        if self._recovery.is_trial_due:
            if self._batch_queue:
                return False
            self._recovery.change_trial()
        return not (self._pauses.is_on or self._lock.is_held)
