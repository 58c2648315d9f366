"""The times that a step log has: those for which a policy asks, and those of steps."""

from collections.abc import Callable

from services.scheduler.core.engine.step_costs import ObservedStep, StepCosts


class NotedCosts(StepCosts):
    """Notes each observed step until it is taken."""

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
    """A clock that is read once for each call of the scheduler, when the call asks for the time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now: float | None = None

    def __call__(self) -> float:
        if self._now is None:
            self._now = self._clock()
        return self._now

    def take(self) -> float | None:
        """The time of the call that ends. None if it did not ask."""
        now, self._now = self._now, None
        return now
