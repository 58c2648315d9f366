"""Simulated workers whose steps take a given time of the event loop and run one after another."""

import asyncio
from dataclasses import dataclass, replace
from itertools import pairwise

from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from tests.scheduler.fakes import FakeExecutor


@dataclass(slots=True)
class TimedStep:
    """A step, with its times of arrival, start and end by the event loop's clock."""

    plan: SchedulerOutput
    arrived: float
    began: float
    ended: float

    def has(self, name: str) -> bool:
        return any(request.request_id == name for request in self.plan.requests)


class TimedExecutor(FakeExecutor):
    """An `Executor` (the engine's port to the workers) whose steps take `step_seconds`. A step that
    arrives while another runs begins when the other ends.
    """

    def __init__(self, block_size: int, num_slots: int, step_seconds: float) -> None:
        super().__init__(block_size, num_slots)
        self.hold()
        self.step_seconds = step_seconds
        self.measures = True
        """Whether the workers report how early each step arrived (`slack_seconds`)."""
        self.steps: list[TimedStep] = []

    @property
    def gaps(self) -> list[float]:
        """How long the workers were idle before each step except the first."""
        return [after.began - before.ended for before, after in pairwise(self.steps)]

    @property
    def num_begun(self) -> int:
        now = asyncio.get_running_loop().time()
        return sum(step.began <= now for step in self.steps)

    async def submit(
        self, plan: SchedulerOutput, traceparent: str = ""
    ) -> asyncio.Future[ModelRunnerOutput]:
        answer = await super().submit(plan, traceparent)
        loop = asyncio.get_running_loop()
        now, free = loop.time(), self.steps[-1].ended if self.steps else None
        began = now if free is None else max(now, free)
        self.steps.append(TimedStep(plan, now, began, began + self.step_seconds))
        if self.measures and free is not None:
            computed, output = self._waiting.pop()
            self._waiting.append((computed, replace(output, slack_seconds=free - now)))
        loop.call_at(self.steps[-1].ended, self._answer_oldest)
        return answer

    def _answer_oldest(self) -> None:
        answer, output = self._waiting.popleft()
        if not answer.done():
            answer.set_result(output)
