"""Who waits, in the order in which they are admitted."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from services.scheduler.core.config import Policy
from services.scheduler.core.request import Request


class RequestQueue(Protocol):
    """The waiting queue. Iterates from the head."""

    def add(self, request: Request) -> None:
        """Queues a request that arrived."""

    def put_back(self, request: Request) -> None:
        """Queues a request that was preempted: at the head, where the order leaves a choice."""

    def remove(self, request: Request) -> None:
        """Takes a request out of the middle. Raises ValueError when it does not wait."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...


def create_request_queue(policy: Policy) -> RequestQueue:
    """The queue that a policy wants."""
    return PriorityRequestQueue() if policy is Policy.PRIORITY else FCFSRequestQueue()


class FCFSRequestQueue:
    """First come, first served; the last one preempted is the first to come back."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        self._requests.appendleft(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


def _rank(request: Request) -> tuple[int, float, str]:
    return request.priority, request.arrival_time, request.request_id


class PriorityRequestQueue:
    """Smallest (priority, arrival time, id) first, preempted or not.

    A sorted list: bisection finds a place, and moving pointers is cheaper than comparing in Python
    as a heap must.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_rank)

    put_back = add

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, _rank(request), key=_rank)
        while self._requests[index : index + 1] != [request]:
            if index >= len(self._requests):
                raise ValueError(f"{request.request_id} does not wait")
            index += 1
        del self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
