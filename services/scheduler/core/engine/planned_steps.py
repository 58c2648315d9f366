"""Numbers the steps, and lists the planned steps whose output has not arrived."""

from collections.abc import Callable, Collection

from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request


class PlannedSteps:
    """Counts the planned steps, and lists the steps in flight, oldest first. A step is in flight
    until its output arrives.
    """

    def __init__(self) -> None:
        self.in_flight: list[SchedulerOutput] = []
        self.next_number = 0
        self.last_updated = -1
        """Number of the last step whose output was applied."""

    def add(self, plan: SchedulerOutput) -> None:
        """Counts a planned step. It is in flight if it computes tokens."""
        self.next_number += 1
        if plan.requests:
            self.in_flight.append(plan)

    def updated(self, plan: SchedulerOutput) -> None:
        """Records that the outputs of this step and of all earlier steps have arrived."""
        self.last_updated = plan.step
        while self.in_flight and self.in_flight[0].step <= plan.step:
            del self.in_flight[0]

    def forget(self) -> None:
        """Removes the steps in flight, whose outputs will not arrive."""
        self.in_flight = []
        self.last_updated = self.next_number - 1

    def drop(self, requests: Collection[Request]) -> None:
        """Discards the tokens of these requests that steps in flight sample."""
        for plan in self.in_flight:
            plan.dropped |= set(plan.requests).intersection(requests)

    def drops(self, request: Request) -> bool:
        """Whether a step in flight samples tokens of the request that will be discarded."""
        return any(request in plan.dropped for plan in self.in_flight)

    def last_awaited(self, request: Request) -> int | None:
        """Number of the last step in flight that computes tokens of a request and whose output for
        the request is not dropped. None if there is no such step.
        """
        for plan in reversed(self.in_flight):
            if request in plan.requests and request not in plan.dropped:
                return plan.step
        return None

    def num_tokens(self) -> Callable[[Request], int]:
        """Returns a function that maps a request to its number of tokens in the steps that are in
        flight at this time.
        """
        steps = [
            dict(zip(plan.requests, plan.num_scheduled_tokens, strict=True))
            for plan in self.in_flight
        ]
        return lambda request: sum(step.get(request, 0) for step in steps)
