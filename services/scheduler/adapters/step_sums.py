"""Sums over the steps done so far, of which a request that decodes takes differences.

A step adds to them once, however many requests are in it.
"""

from bisect import bisect_left

from services.scheduler.core.timeline import NO_STEPS, StepTotals


class StepSums:
    """Totals of all steps, and the largest batch since any of them."""

    def __init__(self) -> None:
        self.totals = NO_STEPS
        self.last_step = -1
        self.last_done_nanos = 0
        """When the tokens of the last step arrived."""
        self._steps: list[int] = []
        """Steps with no larger batch behind them; the sizes fall."""
        self._sizes: list[int] = []

    def add(self, step: int, totals: StepTotals, now: int) -> None:
        """Adds a step that is done."""
        self.totals = self.totals.plus(totals)
        self.last_step, self.last_done_nanos = step, now
        while self._sizes and self._sizes[-1] <= totals.num_requests:
            self._sizes.pop()
            self._steps.pop()
        self._sizes.append(totals.num_requests)
        self._steps.append(step)

    def max_requests_since(self, step: int) -> int:
        """The largest batch of the steps from `step` on; 0 if there is none."""
        index = bisect_left(self._steps, step)
        return self._sizes[index] if index < len(self._sizes) else 0
