"""By priority, and by arrival among requests of one priority."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.scheduler.core.request import Request
from services.scheduler.core.request_queue import RequestQueue
from services.scheduler.core.running_requests import RunningRequests


class PriorityPolicy:
    """Admits the smallest (priority, arrival time) first, and preempts the largest."""

    uses_priority = True

    def create_request_queue(self) -> RequestQueue:
        return PriorityRequestQueue()

    def victim(self, running: RunningRequests) -> Request:
        return max(running, key=lambda request: (request.priority, request.arrival_time))


def _rank(request: Request) -> tuple[int, float, str]:
    return request.priority, request.arrival_time, request.request_id


class PriorityRequestQueue:
    """Smallest (priority, arrival time, id) first, preempted or not.

    A sorted list: finding an index by bisection and moving pointers takes less time than the
    comparisons of a heap, which are made in Python.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_rank)

    prepend = add

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, _rank(request), key=_rank)
        while self._requests[index : index + 1] != [request]:
            if index >= len(self._requests):
                raise ValueError(f"{request.request_id} is not in the queue")
            index += 1
        del self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
