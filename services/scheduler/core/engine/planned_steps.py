"""The steps that were planned and whose output has not come."""

from collections.abc import Callable, Collection

from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request


class PlannedSteps:
    """Counts the steps, and knows those in flight, oldest first."""

    def __init__(self) -> None:
        self.in_flight: list[SchedulerOutput] = []
        self.next_number = 0
        self.last_updated = -1
        """The last step whose output was taken in."""

    def add(self, plan: SchedulerOutput) -> None:
        """A step was planned; it is in flight if it computes anything."""
        self.next_number += 1
        if plan.requests:
            self.in_flight.append(plan)

    def updated(self, plan: SchedulerOutput) -> None:
        """The output of a step came, and with it those of all steps before."""
        self.last_updated = plan.step
        while self.in_flight and self.in_flight[0].step <= plan.step:
            del self.in_flight[0]

    def forget(self) -> None:
        """The outputs of steps in flight will not come."""
        self.in_flight = []
        self.last_updated = self.next_number - 1

    def drop(self, requests: Collection[Request]) -> None:
        """Takes no token of these requests that a step in flight samples."""
        for plan in self.in_flight:
            plan.dropped |= set(plan.requests).intersection(requests)

    def drops(self, request: Request) -> bool:
        """Whether a step in flight samples tokens of a request that are not taken."""
        return any(request in plan.dropped for plan in self.in_flight)

    def last_awaited(self, request: Request) -> int | None:
        """The last step in flight that computes tokens of a request and whose output for it is not
        dropped; None if there is none.
        """
        for plan in reversed(self.in_flight):
            if request in plan.requests and request not in plan.dropped:
                return plan.step
        return None

    def num_tokens(self) -> Callable[[Request], int]:
        """A function from a request to its tokens in the steps that are in flight now."""
        steps = [
            dict(zip(plan.requests, plan.num_scheduled_tokens, strict=True))
            for plan in self.in_flight
        ]
        return lambda request: sum(step.get(request, 0) for step in steps)
