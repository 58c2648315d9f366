"""Decides which steps schedule no prompts, only decoding requests."""

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.planning.step_builder import StepBuilder


class PrefillPacing:
    """Limits how often a step contains prompts while requests decode. Equivalent to vLLM's
    `prefill_schedule_interval`.

    A step with prompts takes longer than a decode-only step and delays every decoding request. With
    an interval of n, at least n - 1 decode-only steps lie between two steps with prompts. The
    interval is ignored if the last step that could admit prompts left requests waiting, because
    prompts then arrive faster than the interval allows.
    """

    def __init__(self, interval: int) -> None:
        self.is_on = interval > 1
        """Whether the interval has an effect."""
        self._interval = interval
        self._num_steps_between = interval
        """Number of steps that computed tokens since the last step with prompts."""
        self.left_waiting = False
        """Whether the last step that could admit prompts left requests waiting."""

    def defers_prefills(self, running: RunningRequests, *, throttled: bool) -> bool:
        """Whether the next step schedules no prompts, because of `throttled` or the interval."""
        is_too_soon = self._num_steps_between < self._interval - 1
        if self.left_waiting or not (throttled or is_too_soon):
            return False
        return any(not request.is_prefill_chunk for request in running)

    def planned(self, builder: StepBuilder) -> None:
        """Counts a planned step. Must be called before the step's tokens are counted as computed. A
        running request that recomputes tokens after a failed load does not count as a prompt.
        """
        if builder.plan.requests:
            has_prefills = any(
                request.num_tokens - request.num_computed_tokens > 1
                if request in builder.plan.block_tables
                else request.is_prefill_chunk
                for request in builder.off_fast_path
            )
            self._num_steps_between = 0 if has_prefills else self._num_steps_between + 1
