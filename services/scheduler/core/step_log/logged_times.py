"""The times in a step log (a record of a scheduler's calls): clock readings and step durations."""

from collections.abc import Callable

from services.scheduler.core.step_costs import ObservedStep, StepCosts


class NotedCosts(StepCosts):
    """Stores each observed step until `take` returns it, so that the log can list the step."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[ObservedStep] = []

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        super().observe(num_requests, num_tokens, seconds)
        if num_requests:
            self._noted.append((num_requests, num_tokens, seconds))

    def take(self) -> list[ObservedStep]:
        noted, self._noted = self._noted, []
        return noted


class CallClock:
    """A clock that stands still during a call of the scheduler, from its first reading on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now: float | None = None

    def __call__(self) -> float:
        if self._now is None:
            self._now = self._clock()
        return self._now

    def take(self) -> float | None:
        """Ends a call of the scheduler. Returns the time that it read, or None if it read none."""
        now, self._now = self._now, None
        return now
