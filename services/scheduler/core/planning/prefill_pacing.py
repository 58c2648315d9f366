"""Decides which steps schedule no prompts, only decoding requests."""

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.planning.step_builder import StepBuilder


class PrefillPacing:
    """Limits how often a step computes prompt tokens while requests decode (vLLM's
    `prefill_schedule_interval`), because such a step takes longer and delays decoding requests.

    With an interval of n, at least n - 1 decode-only steps lie between two steps with prompt
    tokens. The interval is ignored if the last step that could admit prompts left requests waiting,
    because prompts then arrive faster than the interval allows.
    """

    def __init__(self, interval: int) -> None:
        self.is_on = interval > 1
        """False if every step may contain prompts."""
        self._interval = interval
        self._num_steps_between = interval
        """Number of decode-only steps since the last step with prompts."""
        self.left_waiting = False
        """Whether the last step that could admit prompts left requests waiting."""

    def defers_prefills(self, running: RunningRequests, *, throttled: bool) -> bool:
        """Whether the next step schedules no prompts, because of `throttled` or the interval."""
        is_too_soon = self._num_steps_between < self._interval - 1
        if self.left_waiting or not (throttled or is_too_soon):
            return False
        return any(not request.is_prefill_chunk for request in running)

    def planned(self, builder: StepBuilder) -> None:
        """Counts a planned step. Must be called before the step's tokens count as computed. Tokens
        that a running request computes again after a failed KV load do not count as a prompt.
        """
        if builder.plan.requests:
            has_prefills = any(
                request.num_tokens - request.num_computed_tokens > 1
                if request in builder.plan.block_tables
                else request.is_prefill_chunk
                for request in builder.off_fast_path
            )
            self._num_steps_between = 0 if has_prefills else self._num_steps_between + 1
