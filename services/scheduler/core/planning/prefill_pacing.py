"""Decides in which steps prompts wait, so that these hold only requests that decode."""

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.planning.step_builder import StepBuilder


class PrefillPacing:
    """Lets steps with prompts follow each other only at an interval, while requests decode.

    A step with prompts takes longer than one without, and every request that decodes waits for it.
    With an interval of n, n - 1 steps that only decode come between two with prompts. They do not
    if the last step that could admit left requests waiting, for then prompts come faster than
    that. As vLLM's prefill_schedule_interval.
    """

    def __init__(self, interval: int) -> None:
        self.is_on = interval > 1
        """Whether there is such an interval."""
        self._interval = interval
        self._num_steps_between = interval
        """Steps with tokens since the last one with prompts."""
        self.left_waiting = False
        """Whether the last step that could admit prompts left requests waiting."""

    def defers_prefills(self, running: RunningRequests, *, throttled: bool) -> bool:
        """Whether the next step leaves prompts out; `throttled`: whether the caller wants that."""
        is_too_soon = self._num_steps_between < self._interval - 1
        if self.left_waiting or not (throttled or is_too_soon):
            return False
        return any(not request.is_prefill_chunk for request in running)

    def planned(self, builder: StepBuilder) -> None:
        """Counts a step, before its tokens count as computed. A running request that computes again
        what was not loaded for it does not count as a prompt.
        """
        if builder.plan.requests:
            has_prefills = any(
                request.num_tokens - request.num_computed_tokens > 1
                if request in builder.plan.block_tables
                else request.is_prefill_chunk
                for request in builder.off_fast_path
            )
            self._num_steps_between = 0 if has_prefills else self._num_steps_between + 1
