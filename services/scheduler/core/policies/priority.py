"""The policy PRIORITY: by priority, and by arrival among requests of one priority."""

from bisect import insort
from heapq import heappop, heappush

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.policy import RequestQueue
from services.scheduler.core.request import Request


class PriorityPolicy:
    """Admits the smallest (priority, arrival time) first, and preempts the largest."""

    uses_priority = True

    def create_request_queue(self) -> RequestQueue:
        return PriorityRequestQueue()

    def victim(self, running: RunningRequests) -> Request:
        return max(running, key=lambda request: (request.priority, request.arrival_time))


def _rank(request: Request) -> tuple[int, float, str]:
    return request.priority, request.arrival_time, request.request_id


class PriorityRequestQueue(list[Request]):
    """Smallest (priority, arrival time, id) first, preempted or not.

    A sorted list: bisection and moving pointers take less time than the comparisons of a heap,
    which are made in Python.
    """

    def add(self, request: Request, /) -> None:
        insort(self, request, key=_rank)

    prepend = add

    has_misplaced = False
    """Whether a rank has changed since the queue was put in order."""

    def reorder(self) -> None:
        """As in vLLM, whose heap moves no request when its rank changes, only when others are added
        or taken out.
        """
        self.has_misplaced = True
        self[:] = _given_out([self[index] for index in _layout(len(self))])

    def put_in_order(self) -> None:
        if self.has_misplaced:
            self.has_misplaced = False
            self.sort(key=_rank)


def _layout(count: int) -> list[int]:
    """The indexes of `count` requests in the order of a heap that they were pushed to, the last one
    first.
    """
    heap: list[int] = []
    for index in reversed(range(count)):
        heappush(heap, index)
    return heap


def _given_out(heap: list[Request]) -> list[Request]:
    """Requests in the order in which they are popped from a heap; one may be misplaced in it."""
    ranked = [(_rank(request), index, request) for index, request in enumerate(heap)]
    return [heappop(ranked)[2] for _ in heap]
