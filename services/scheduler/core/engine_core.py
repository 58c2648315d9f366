"""The loop that turns plans into tokens."""

import asyncio
import enum
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from services.common.errors import FailedPrecondition, Unavailable
from services.scheduler.core.fault_search import FaultSearch
from services.scheduler.core.output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.ports import (
    Delivery,
    Executor,
    PoolLost,
    Readiness,
    Replica,
    StepObserver,
    WorkersLost,
)
from services.scheduler.core.request import FinishReason, Request
from services.scheduler.core.scheduler import PauseMode, Scheduler

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.1
"""Wait before the second of several recoveries in a row; it doubles with each further one."""
LAST_BACKOFF_SECONDS = 5.0


class EngineState(enum.Enum):
    """Where the engine stands."""

    IDLE = "idle"
    RUNNING = "running"
    PAUSED = "paused"
    RECOVERING = "recovering"


class EngineCore:
    """Drives one scheduler: requests in, steps out to the workers, tokens back to who waits.

    Everything that changes the scheduler happens in the turns of `run`, one after another; the
    other methods leave word and may be called at any time from the same event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        replica: Replica,
        delivery: Delivery,
        observer: StepObserver,
        readiness: Readiness,
    ) -> None:
        self.scheduler = scheduler
        self.state = EngineState.IDLE
        self.state_reason = ""
        self._executor = executor
        self._replica = replica
        self._delivery = delivery
        self._observer = observer
        self._readiness = readiness
        self._arrivals: list[Request] = []
        self._ends: dict[Request, FinishReason] = {}
        self._in_flight: deque[tuple[SchedulerOutput, asyncio.Future[ModelRunnerOutput]]] = deque()
        self._unsent: SchedulerOutput | None = None
        self._undelivered: EngineCoreOutputs | None = None
        self._wake = asyncio.Event()
        self._turns = asyncio.Condition()
        self._num_holds = 0
        self._awaits_answer = False
        self._lost: PoolLost | WorkersLost | None = None
        self.num_pool_losses = 0
        self.num_worker_losses = 0
        self._num_losses = 0
        self._search = FaultSearch()
        self._trial: Sequence[Request] | None = None
        self._depth = 2 if scheduler.config.async_scheduling else 1

    @property
    def num_waiting(self) -> int:
        """Requests that have not been scheduled yet, or were preempted."""
        return self.scheduler.num_waiting + len(self._arrivals)

    @property
    def _is_paused(self) -> bool:
        return self.scheduler.pause_mode is not None

    def add(self, request: Request) -> None:
        """Queues a request for the next turn."""
        self._arrivals.append(request)
        self._wake.set()

    def abort(self, requests: Iterable[Request], reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends requests, wherever they stand: at once while the loop waits for a step's answer, and
        otherwise before the next step is planned. A step in flight is not held up. QUEUE_TIMEOUT
        ends only those that have not been scheduled by then.
        """
        self._ends |= dict.fromkeys(requests, reason)
        if self._awaits_answer:
            self._take_in()
        else:
            self._wake.set()

    def unscheduled(self) -> list[Request]:
        """Requests that wait and have not been scheduled yet."""
        waiting = (self.scheduler.waiting, self.scheduler.held_back, self._arrivals)
        return [
            request
            for requests in waiting
            for request in requests
            if request.num_cached_tokens is None
        ]

    def lost(self, lost: PoolLost | WorkersLost) -> None:
        """Notes that pool or workers are away, where no step in flight brings it to light."""
        self._lost = lost
        self._wake.set()

    async def run(self) -> None:
        """Steps for ever. A lost pool or worker costs recomputation; anything else is a defect."""
        try:
            while True:
                try:
                    await self._until_work()
                    async with self._turns:
                        await self._turn()
                        self._turns.notify_all()
                except (PoolLost, WorkersLost) as lost:
                    await self._recover(lost)
        finally:
            self._drop_steps()
            self._observer.lost(())

    async def pause(self, *, abort: bool) -> None:
        """Stops planning; returns when no step is in flight and the pool knows who has ended.
        `abort` ends what is alive.
        """
        self.scheduler.pause(PauseMode.ABORT if abort else PauseMode.KEEP)
        self._observer.paused()
        async with self.standstill():
            self._take_in()
            if abort:
                self._end(dict.fromkeys(self.scheduler.requests, FinishReason.ABORT))
            with suppress(PoolLost):  # the next step finds out, and recovers
                await self.scheduler.flush()
            if self.state is not EngineState.RECOVERING:
                self.state = EngineState.PAUSED

    def resume(self) -> None:
        """Goes on planning."""
        self.scheduler.resume()
        self._observer.resumed()
        self._wake.set()

    async def reset_prefix_cache(self, *, preempt_running: bool) -> None:
        """Forgets every cached prefix. Raises FailedPrecondition while requests hold blocks, and
        Unavailable while pool or workers are away.
        """
        async with self.standstill():
            if self.state is EngineState.RECOVERING:
                raise Unavailable(self.state_reason)
            if preempt_running:
                self._observer.preempted(self.scheduler.preempt_all())
            if not await self.scheduler.reset_prefix_cache():
                raise FailedPrecondition("requests hold blocks", reason="BLOCKS_IN_USE")

    @asynccontextmanager
    async def standstill(self) -> AsyncIterator[None]:
        """Between turns, with no step in flight. The loop itself takes back what is in flight, so
        that whoever asks may give up asking.
        """
        self._num_holds += 1
        self._wake.set()
        try:
            async with self._turns:
                await self._turns.wait_for(lambda: not self._in_flight)
                yield
        finally:
            self._num_holds -= 1
            self._wake.set()

    async def _turn(self) -> None:
        """Takes in what was said, plans and sends a step, takes back the tokens of the oldest.

        With asynchronous scheduling the oldest is the step before: it runs while this one is
        planned, and when nothing could be planned there is only its answer to wait for. In a pause
        the pool is still told at once who has ended.
        """
        self._take_in()
        planned = False
        if self._may_plan() and self.scheduler.has_work:
            traceparent = self._observer.begin()
            plan = await self.scheduler.schedule(traceparent)
            self._observer.planned(plan)
            planned = bool(plan.requests)
            if planned or plan.removed_rows:
                self._unsent = plan
                answer = await self._executor.submit(plan, traceparent)
                self._in_flight.append((plan, answer))
                self._unsent = None
        elif self._is_paused:
            await self.scheduler.flush()
        if self._in_flight and (len(self._in_flight) >= self._depth or not planned):
            await self._complete()

    async def _complete(self) -> None:
        """Takes in a step's tokens. They are delivered while the loop waits for somebody, the pool
        or the workers: whoever computes does not wait for that.
        """
        plan, answer = self._in_flight[0]
        self._awaits_answer = True
        try:
            output = await answer
        finally:
            self._awaits_answer = False
        self._in_flight.popleft()
        self._take_in()
        self._deliver()
        update = self._undelivered = self.scheduler.update_from_output(plan, output)
        if self._num_losses:
            self._note_progress(plan)
        asyncio.get_running_loop().call_soon(self._deliver)
        self._observer.done(plan, update)

    def _deliver(self) -> None:
        """Passes on what waits; if that fails it waits on, for the engine itself to fail by it."""
        if self._undelivered is not None:
            self._delivery.deliver(self._undelivered)
            self._undelivered = None

    def _take_in(self) -> None:
        if self._arrivals:
            arrivals, self._arrivals = self._arrivals, []
            for request in arrivals:
                self.scheduler.add(request)
            self._observer.arrived(arrivals)
        if self._ends:
            ends, self._ends = self._ends, {}
            self._end(ends)

    def _end(self, ends: Mapping[Request, FinishReason]) -> None:
        alive = [request for request, reason in ends.items() if _can_end(request, reason)]
        for request in alive:
            self.scheduler.abort(request, ends[request])
        if alive:
            self._deliver()
            self._delivery.deliver_ends(alive)
            self._observer.ended(alive)

    async def _until_work(self) -> None:
        while not (self._arrivals or self._ends or self._in_flight) and (
            self._is_paused or self._num_holds or not (self.scheduler.has_work or self._trial)
        ):
            self.state = EngineState.PAUSED if self._is_paused else EngineState.IDLE
            self._deliver()
            if self._lost is not None:
                raise self._lost
            self._wake.clear()
            await self._wake.wait()
        self.state = EngineState.RUNNING

    async def _recover(self, lost: Unavailable) -> None:
        """Starts over with an empty pool and empty workers, as soon as both are there. Requests
        keep their tokens; they come and end meanwhile as ever.
        """
        logger.warning("%s; recovering", lost.message)
        self.state, self.state_reason = EngineState.RECOVERING, lost.message
        self._readiness.not_ready(lost.message)
        async with self._turns:
            failed = [plan for plan, _ in self._in_flight]
            self._drop_steps()
            preempted = self.scheduler.forget_pool()
            self._observer.lost(preempted)
            if isinstance(lost, WorkersLost):
                self.num_worker_losses += 1
                self._blame([*failed, *filter(None, [self._unsent])])
            else:
                self.num_pool_losses += 1
                self._begin_trial()
            self._unsent = None
            self._turns.notify_all()
        self._lost = None
        await self._reopen(backoff_seconds(self._num_losses))
        self._num_losses += 1
        self.state_reason = ""
        self._readiness.ready()
        logger.info("recovered; %d requests are computed again", len(preempted))

    async def _reopen(self, backoff_seconds: float) -> None:
        """Waits for pool and workers, and takes in meanwhile what is said."""
        reopening = asyncio.create_task(self._reopen_after(backoff_seconds), name="reopen")
        reopening.add_done_callback(lambda _: self._wake.set())
        try:
            while not reopening.done():
                self._wake.clear()
                async with self._turns:
                    self._take_in()
                await self._wake.wait()
            reopening.result()
        finally:
            reopening.cancel()

    async def _reopen_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._replica.reopen()

    def _blame(self, failed: Sequence[SchedulerOutput]) -> None:
        """Notes which requests were in steps that broke the workers; ends one that always does."""
        culprit = self._search.steps_failed(failed)
        if culprit is not None:
            logger.error("request %s is given up: its steps always fail", culprit.request_id)
            self._num_losses = 0
            self._end({culprit: FinishReason.STEP_FAILED})
        self._begin_trial()

    def _may_plan(self) -> bool:
        """Whether a step may be planned. Where the search for a fault wants other requests to run,
        that is once the steps in flight are done.
        """
        if self._search.is_active or self._trial is not None:
            if self._search.trial() != self._trial and not self._in_flight:
                self._observer.preempted(self.scheduler.preempt_all())
                self._begin_trial()
            if self._search.trial() != self._trial:
                return False
        return not (self._is_paused or self._num_holds)

    def _begin_trial(self) -> None:
        """Holds back what must not run beside the suspects whose turn it is; nothing runs now."""
        trial = self._search.trial()
        if trial != self._trial:
            self._trial = trial
            self.scheduler.admit_only(trial)

    def _note_progress(self, plan: SchedulerOutput) -> None:
        """A step was done after a loss: once no request is suspected the loss is over."""
        if self._search.is_active:
            self._search.step_done(plan)
        else:
            self._num_losses = 0

    def _drop_steps(self) -> None:
        """Nobody waits for what is in flight any more, whatever it brings."""
        for _, answer in self._in_flight:
            if answer.done() and not answer.cancelled():
                answer.exception()
            answer.cancel()
        self._in_flight.clear()


def _can_end(request: Request, reason: FinishReason) -> bool:
    if reason is FinishReason.QUEUE_TIMEOUT and request.num_cached_tokens is not None:
        return False  # it was scheduled meanwhile
    return not request.is_finished


def backoff_seconds(num_losses: int) -> float:
    """Time to wait before a recovery, after so many in a row."""
    if num_losses == 0:
        return 0.0
    doublings = min(num_losses - 1, 16)
    return min(FIRST_BACKOFF_SECONDS * (1 << doublings), LAST_BACKOFF_SECONDS)
