"""The batch queue: the steps that were sent to the workers and whose outputs have not arrived."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from services.scheduler.core.engine.planning_clock import PlanningClock
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.ports import Executor


class BatchQueue:
    """Sends steps to the workers, and waits for their outputs, in order. Contains at most `depth`
    steps. `now` returns the time of a monotonic clock, in seconds.
    """

    def __init__(self, executor: Executor, depth: int, now: Callable[[], float]) -> None:
        self.awaits_answer = False
        """Whether the engine loop waits for the output of the oldest step."""
        self.planning = PlanningClock()
        self._executor = executor
        self._depth = depth
        self._now = now
        self._planning_began: float | None = None
        self._steps: deque[tuple[SchedulerOutput, asyncio.Future[ModelRunnerOutput]]] = deque()
        self._unsent: SchedulerOutput | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step's output must arrive before another step may be sent."""
        return len(self._steps) >= self._depth

    async def until_due(self) -> None:
        """Waits until it is time to plan the next step, or until the running step has ended."""
        now = self._now()
        if self._steps and (seconds := self.planning.due - now) > 0:
            _, answer = self._steps[0]
            self.awaits_answer = True
            try:
                await _until_done(answer, seconds)
            finally:
                self.awaits_answer = False
            now = self._now()
        self._planning_began = now

    async def send(self, plan: SchedulerOutput, traceparent: str) -> None:
        """Sends a step to the workers. Raises WorkersLost."""
        self._unsent = plan
        answer = await self._executor.submit(plan, traceparent)
        if not self._steps:
            self.planning.begins(plan.num_tokens, self._now())
        elif self._planning_began is not None:
            self.planning.planned(plan.step, self._planning_began)
        self._steps.append((plan, answer))
        self._unsent = None

    async def take_answer(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Waits for the output of the oldest step, and removes the step. Raises WorkersLost."""
        plan, answer = self._steps[0]
        self.awaits_answer = True
        try:
            output = await answer
        finally:
            self.awaits_answer = False
        self._steps.popleft()
        self.planning.answered(plan.step, output.slack_seconds)
        if self._steps:
            self.planning.begins(self._steps[0][0].num_tokens, self._now())
        return plan, output

    async def is_answered(self, wake: asyncio.Event, is_interrupted: Callable[[], bool]) -> bool:
        """Waits for the output of the oldest step. Returns True when the output has arrived, or
        False as soon as `is_interrupted()` is true, which is called now and whenever `wake` is set.
        """
        _, answer = self._steps[0]
        self.awaits_answer = True
        try:
            while not answer.done():
                wake.clear()
                if is_interrupted():
                    return False
                woken = asyncio.ensure_future(wake.wait())
                either: set[asyncio.Future[Any]] = {answer, woken}
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    woken.cancel()
        finally:
            self.awaits_answer = False
        return True

    def drop(self) -> list[SchedulerOutput]:
        """Drops all steps. Returns their plans, and the plan of a step that could not be sent."""
        dropped = [plan for plan, _ in self._steps]
        if self._unsent is not None:
            dropped.append(self._unsent)
        for _, answer in self._steps:
            if answer.done() and not answer.cancelled():
                answer.exception()
            answer.cancel()
        self._steps.clear()
        self.planning.forget()
        self._unsent = None
        return dropped


async def _until_done(answer: asyncio.Future[Any], seconds: float) -> None:
    """Waits until `answer` is done, at most `seconds`. Like `asyncio.wait`, but cheaper."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def end(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(seconds, end)
    answer.add_done_callback(end)
    try:
        await waiter
    finally:
        timer.cancel()
        answer.remove_done_callback(end)
