"""Small working fakes of the ports of the scheduler's engine: workers that can be blocked or lost,
a pool that can be lost, a replica that restores the two, a receiver of tokens, an observer of
steps.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from services.common.pool.operations import Operation, Outcome
from services.scheduler.core import ports
from services.scheduler.core.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    PreemptionCause,
    SchedulerOutput,
)
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool
from tests.scheduler.paged_model import PagedModel

SECONDS = 60.0

_Answer = asyncio.Future[ModelRunnerOutput]


class FragilePool(InProcessPool):
    """A `KVPool` over the pool service's real core. Tests can make it fail."""

    @property
    def num_free_blocks(self) -> int:
        return self.core.num_free_blocks

    def lose(self) -> None:
        self.num_answers_left = 0

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        await asyncio.sleep(0)
        return await super().transact(operations, traceparent)


class FakeExecutor:
    """An `Executor` (the engine's port to workers) over a PagedModel. Answers can be blocked."""

    def __init__(self, block_size: int, num_slots: int) -> None:
        self._shape = block_size, num_slots
        self._model = PagedModel(*self._shape)
        self._waiting: deque[tuple[_Answer, ModelRunnerOutput]] = deque()
        self._is_lost = False
        self._is_held = False
        self.num_steps = 0
        self.breaks: frozenset[int] = frozenset()
        """Batch indexes of the requests for which the next steps report NaN logits."""
        self.poison: frozenset[int] = frozenset()
        """Tokens that make the workers fail in any step that computes them."""
        self.broken_by: list[set[str]] = []
        """For each step that made the workers fail, the names of its requests."""

    @property
    def num_requests(self) -> int:
        return self._model.num_requests

    @property
    def num_in_flight(self) -> int:
        return len(self._waiting)

    def hold(self) -> None:
        self._is_held = True

    def let_go(self) -> None:
        self._is_held = False
        while self._waiting:
            answer, output = self._waiting.popleft()
            if not answer.done():
                answer.set_result(output)

    def lose(self) -> None:
        self._is_lost = True
        while self._waiting:
            answer, _ = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(ports.WorkersLost("the workers are away"))

    def renew(self) -> None:
        """Replaces the workers by new ones with empty batches and caches."""
        self._model = PagedModel(*self._shape)
        self._is_lost = self._is_held = False

    async def submit(self, plan: SchedulerOutput, traceparent: str = "") -> _Answer:  # noqa: ARG002
        if self._is_lost:
            raise ports.WorkersLost("the workers are away")
        self.num_steps += 1
        if self.poison and not self.poison.isdisjoint(_computed_tokens(plan)):
            self.broken_by.append({request.request_id for request in plan.requests})
            answer: _Answer = asyncio.get_running_loop().create_future()
            self._waiting.append((answer, ModelRunnerOutput([])))
            self.lose()
            return answer
        broken = self.breaks & frozenset(range(len(plan.requests)))
        output = ModelRunnerOutput(self._model.run_plan(plan).token_ids, nan_requests=broken)
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, output))
        if not self._is_held:
            asyncio.get_running_loop().call_soon(self._answer_all)
        return answer

    def _answer_all(self) -> None:
        if not self._is_held:
            self.let_go()


def _computed_tokens(plan: SchedulerOutput) -> set[int]:
    starts, counts = plan.num_computed_tokens, plan.num_scheduled_tokens
    return {
        token
        for request, start, count in zip(plan.requests, starts, counts, strict=True)
        for token in request.token_ids[start : start + count]
    }


class FakeReplica:
    """A `PoolAndWorkers` that restores pool and workers as soon as both are available again."""

    def __init__(self, pool: FragilePool, executor: FakeExecutor) -> None:
        self.there = asyncio.Event()
        self.there.set()
        self.num_reopened = 0
        self.workers_were_ended = False
        self._pool = pool
        self._executor = executor

    async def open(self) -> None:
        await self.there.wait()
        self._pool.reopen()
        self._executor.renew()
        self.num_reopened += 1


class Inbox:
    """A `Delivery` that stores each request's tokens, and the names of the requests that ended."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self._news = asyncio.Event()

    def deliver(self, update: EngineCoreOutputs) -> None:
        for news in update:
            name = news.request.request_id
            assert name not in self.ended, f"{name} has ended already"
            self.tokens.setdefault(name, []).extend(news.token_ids)
        self.deliver_ends(update.ended)

    def deliver_ends(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.request_id not in self.ended, f"{request.request_id} has ended already"
            self.tokens.setdefault(request.request_id, [])
            self.ended.append(request.request_id)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that a delivery of tokens or of an end may make true."""
        async with asyncio.timeout(SECONDS):
            while not condition():
                self._news.clear()
                await self._news.wait()


class ReadinessLog:
    def __init__(self) -> None:
        self.lacks: list[str] = []

    def ready(self) -> None:
        self.lacks.append("")

    def not_ready(self, reason: str) -> None:
        self.lacks.append(reason)


class Watcher:
    """A `StepObserver` that counts events, and checks that every step that begins also ends."""

    def __init__(self) -> None:
        self.num_planned = 0
        self.num_done = 0
        self.num_lost = 0
        self.num_ended = 0
        self.num_recovered = 0
        self.preempted_ids: list[str] = []
        self.causes: list[PreemptionCause] = []
        self.is_paused = False
        self._has_begun = False

    def arrived(self, requests: Sequence[Request]) -> None:
        pass

    def begin(self) -> str:
        assert not self._has_begun
        self._has_begun = True
        return ""

    def planned(self, plan: SchedulerOutput) -> None:
        self._has_begun = False
        self.num_planned += 1
        self.preempted_ids += [request.request_id for request in plan.preempted]

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:  # noqa: ARG002
        self.num_done += 1

    def ended(self, requests: Sequence[Request]) -> None:
        self.num_ended += len(requests)

    def paused(self) -> None:
        self.is_paused = True

    def resumed(self) -> None:
        self.is_paused = False

    def preempted(self, requests: Sequence[Request], cause: PreemptionCause) -> None:
        self.preempted_ids += [request.request_id for request in requests]
        self.causes.append(cause)

    def lost(self, preempted: Sequence[Request], lost: ports.PoolLost | ports.WorkersLost) -> None:  # noqa: ARG002
        self._has_begun = False
        self.num_lost += 1
        self.preempted_ids += [request.request_id for request in preempted]

    def recovered(self) -> None:
        self.num_recovered += 1

    def stopped(self) -> None:
        self._has_begun = False
