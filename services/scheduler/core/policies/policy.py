"""The port of scheduling policies, which choose the order of admission and preemption's victim."""

from collections.abc import Iterator
from typing import Protocol

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.request import Request


class RequestQueue(Protocol):
    """Waiting requests. Iterates in the order of admission, from the head."""

    def add(self, request: Request, /) -> None:
        """Queues a request that arrived."""

    def prepend(self, request: Request, /) -> None:
        """Queues a preempted request, either at the head or at the position of its priority."""

    def reorder(self) -> None:
        """Must be called after an attribute has changed on which the order of the queue depends."""

    def put_in_order(self) -> None:
        """Sorts the requests by their present attributes."""

    def remove(self, request: Request, /) -> None:
        """Removes a request. Raises ValueError if it is not in the queue."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...


class SchedulingPolicy(Protocol):
    """A scheduling policy. It has no state, because the state is in its queues."""

    uses_priority: bool
    """Whether `Request.priority` has an effect. If not, requests with a priority are refused."""

    def create_request_queue(self) -> RequestQueue:
        """An empty waiting queue."""

    def victim(self, running: RunningRequests) -> Request:
        """The running request to preempt if blocks are missing. At least one request runs."""
