"""Runs steps in the time that a profile says."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import StepInput, StepOutput
from services.worker.core.step_times import StepTimes
from services.worker.core.worker import StepRunner


@dataclass(frozen=True, slots=True)
class TimedRunner:
    """A StepRunner that returns from a step when its time is over. A step takes longer if `runner`
    itself takes longer. Empty steps take no time.

    `clock` returns seconds, and `sleep` waits for a number of seconds.
    """

    runner: StepRunner
    times: StepTimes
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    @property
    def limits(self) -> BatchLimits:
        return self.runner.limits

    def reset(self) -> None:
        self.runner.reset()

    def begin(self, step: StepInput) -> StepOutput | PendingOutput:
        began = self.clock()
        output = self.runner.begin(step)
        counts = step.num_scheduled_tokens
        if len(step.num_draft_tokens) and isinstance(output, StepOutput):
            # The worker may have proposed fewer drafts than the scheduler planned.
            num_drafts = output.num_draft_tokens if len(output.num_draft_tokens) else 0
            counts = counts - step.num_draft_tokens + num_drafts
        left = began + self.times.seconds(counts, step.num_computed_tokens) - self.clock()
        if left > 0:
            self.sleep(left)
        return output

    def execute(self, step: StepInput) -> StepOutput:
        output = self.begin(step)
        return output if isinstance(output, StepOutput) else output.wait()
