"""Totals over all completed steps, for sums over the decode phases of requests."""

from bisect import bisect_left

from services.scheduler.core.timelines.timeline import StepTotals


class StepSums:
    """Totals over all completed steps, and the largest batch since a given step."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._nanos = 0
        self._compute_nanos = 0
        self._prompt_nanos = 0
        self._num_requests = 0
        self.last_step = -1
        self.last_done_nanos = 0
        """Time at which the tokens of the last step arrived."""
        self._steps: list[int] = []
        """Numbers of the steps after which every step so far had a smaller batch. `_sizes` lists
        the batch sizes of these steps, which decrease.
        """
        self._sizes: list[int] = []

    @property
    def totals(self) -> StepTotals:
        return StepTotals(
            self._num_steps,
            self._nanos,
            self._compute_nanos,
            self._prompt_nanos,
            self._num_requests,
        )

    def add(
        self,
        step: int,
        done_nanos: int,
        nanos: int,
        compute_nanos: int,
        prompt_nanos: int,
        num_requests: int,
    ) -> None:
        """Adds a completed step. `StepTotals` explains the values."""
        self._num_steps += 1
        self._nanos += nanos
        self._compute_nanos += compute_nanos
        self._prompt_nanos += prompt_nanos
        self._num_requests += num_requests
        self.last_step, self.last_done_nanos = step, done_nanos
        sizes, steps = self._sizes, self._steps
        while sizes and sizes[-1] <= num_requests:
            sizes.pop()
            steps.pop()
        sizes.append(num_requests)
        steps.append(step)

    def max_requests_since(self, step: int) -> int:
        """The largest batch of the steps from number `step` on. 0 if there are no such steps."""
        index = bisect_left(self._steps, step)
        return self._sizes[index] if index < len(self._sizes) else 0
