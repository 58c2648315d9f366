"""The loop that turns plans into tokens."""

import asyncio
import enum
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from services.common.errors import FailedPrecondition, Unavailable
from services.scheduler.core.plan import StepOutput, StepPlan, StepUpdate
from services.scheduler.core.ports import (
    Delivery,
    Executor,
    PoolLost,
    Readiness,
    Replica,
    StepObserver,
    WorkersLost,
)
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import PauseMode, Scheduler

logger = logging.getLogger(__name__)


class EngineState(enum.Enum):
    """Where the engine stands."""

    IDLE = "idle"
    RUNNING = "running"
    PAUSED = "paused"
    RECOVERING = "recovering"


class Engine:
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
        self._aborts: list[Request] = []
        self._in_flight: deque[tuple[StepPlan, asyncio.Future[StepOutput]]] = deque()
        self._undelivered: StepUpdate | None = None
        self._wake = asyncio.Event()
        self._turns = asyncio.Condition()
        self._num_holds = 0
        self._depth = 2 if scheduler.config.async_scheduling else 1

    @property
    def num_waiting(self) -> int:
        """Requests that have not been scheduled yet, or were preempted."""
        return len(self.scheduler.waiting) + len(self._arrivals)

    @property
    def _is_paused(self) -> bool:
        return self.scheduler.pause_mode is not None

    def add(self, request: Request) -> None:
        """Queues a request for the next turn."""
        self._arrivals.append(request)
        self._wake.set()

    def abort(self, requests: Iterable[Request]) -> None:
        """Ends requests in the next turn, wherever they stand; a step in flight is not held up."""
        self._aborts += requests
        self._wake.set()

    async def run(self) -> None:
        """Steps for ever. A lost pool or worker costs recomputation; anything else is a defect."""
        try:
            while True:
                await self._until_work()
                try:
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
                self._end([*self.scheduler.running, *self.scheduler.waiting])
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
        if not (self._is_paused or self._num_holds) and self.scheduler.has_work:
            traceparent = self._observer.begin()
            plan = await self.scheduler.schedule(traceparent)
            self._observer.planned(plan)
            planned = bool(plan.requests)
            if planned or plan.removed_slots:
                answer = await self._executor.submit(plan, traceparent)
                self._in_flight.append((plan, answer))
        elif self._is_paused:
            await self.scheduler.flush()
        if self._in_flight and (len(self._in_flight) >= self._depth or not planned):
            await self._complete()

    async def _complete(self) -> None:
        """Takes in a step's tokens. They are delivered while the loop waits for somebody, the pool
        or the workers: whoever computes does not wait for that.
        """
        plan, answer = self._in_flight.popleft()
        output = await answer
        self._take_in()
        self._deliver()
        update = self._undelivered = self.scheduler.update_from_output(plan, output)
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
        aborts, self._aborts = self._aborts, []
        self._end(aborts)

    def _end(self, requests: Sequence[Request]) -> None:
        alive = [request for request in dict.fromkeys(requests) if not request.is_finished]
        for request in alive:
            self.scheduler.abort(request)
        if alive:
            self._deliver()
            self._delivery.deliver_ends(alive)
            self._observer.ended(alive)

    async def _until_work(self) -> None:
        while not (self._arrivals or self._aborts or self._in_flight) and (
            self._is_paused or self._num_holds or not self.scheduler.has_work
        ):
            self.state = EngineState.PAUSED if self._is_paused else EngineState.IDLE
            self._deliver()
            self._wake.clear()
            await self._wake.wait()
        self.state = EngineState.RUNNING

    async def _recover(self, lost: Unavailable) -> None:
        """Starts over with whoever is there, or comes back: requests keep their tokens."""
        logger.warning("%s; recovering", lost.message)
        self.state, self.state_reason = EngineState.RECOVERING, lost.message
        self._readiness.not_ready(lost.message)
        async with self._turns:
            self._drop_steps()
            self._turns.notify_all()
        preempted = self.scheduler.forget_pool()
        self._observer.lost(preempted)
        await self._replica.reopen()
        self.state_reason = ""
        self._readiness.ready()
        logger.info("recovered; %d requests are computed again", len(preempted))

    def _drop_steps(self) -> None:
        """Nobody waits for what is in flight any more, whatever it brings."""
        for _, answer in self._in_flight:
            if answer.done() and not answer.cancelled():
                answer.exception()
            answer.cancel()
        self._in_flight.clear()
