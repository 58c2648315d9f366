"""The port of scheduling policies: the order of admission, and the victim of a preemption."""

from collections.abc import Iterator
from typing import Protocol

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.request import Request


class RequestQueue(Protocol):
    """Waiting requests. Iterates in the order of admission, from the head."""

    def add(self, request: Request, /) -> None:
        """Queues a request that arrived."""

    def prepend(self, request: Request, /) -> None:
        """Queues a request that was preempted: at the head, unless the order ranks it elsewhere."""

    def reorder(self) -> None:
        """Notes that what orders one of the requests has changed."""

    def put_in_order(self) -> None:
        """Moves requests to where they belong, by what orders them now."""

    def remove(self, request: Request, /) -> None:
        """Takes a request out. Raises ValueError if it is not in the queue."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...


class SchedulingPolicy(Protocol):
    """One policy. Has no state: what it orders is in the queue that it creates."""

    uses_priority: bool
    """Whether it heeds `Request.priority`. If not, requests that have a priority are refused."""

    def create_request_queue(self) -> RequestQueue:
        """An empty waiting queue."""

    def victim(self, running: RunningRequests) -> Request:
        """The running request to preempt where blocks are missing. At least one request runs."""
