"""The policy PRIORITY orders requests by priority, then by arrival time."""

from bisect import insort
from heapq import heappop, heappush

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.policy import PolicyParts, RequestQueue
from services.scheduler.core.request import Request


class PriorityPolicy:
    """Admits the smallest (priority, arrival time) first, and preempts the largest."""

    uses_priority = True
    retention = None

    def __init__(self, _parts: PolicyParts) -> None:
        """Needs nothing of the scheduler."""

    def create_request_queue(self) -> RequestQueue:
        return PriorityRequestQueue()

    def victim(self, running: RunningRequests) -> Request:
        return max(running, key=lambda request: (request.priority, request.arrival_time))


def _rank(request: Request) -> tuple[int, float, str]:
    return request.priority, request.arrival_time, request.request_id


class PriorityRequestQueue(list[Request]):
    """Waiting requests, sorted by (priority, arrival time, id), the smallest first. Preempted
    requests are sorted in the same way. A sorted list is faster than a heap here, because a heap
    makes more comparisons, which run in Python.
    """

    def add(self, request: Request, /) -> None:
        insort(self, request, key=_rank)

    prepend = add

    has_misplaced = False
    """Whether a rank has changed since the queue was put in order."""

    def reorder(self) -> None:
        """Orders the requests as vLLM's heap would pop them. vLLM's heap moves a request only when
        requests are added or removed, and not when the rank of the request changes.
        """
        self.has_misplaced = True
        self[:] = _given_out([self[index] for index in _layout(len(self))])

    def put_in_order(self) -> None:
        if self.has_misplaced:
            self.has_misplaced = False
            self.sort(key=_rank)


def _layout(count: int) -> list[int]:
    """The layout of a heap of `count` indexes that were pushed in reverse order."""
    heap: list[int] = []
    for index in reversed(range(count)):
        heappush(heap, index)
    return heap


def _given_out(heap: list[Request]) -> list[Request]:
    """The requests of a heap, of which one may be misplaced, in the order of popping."""
    ranked = [(_rank(request), index, request) for index, request in enumerate(heap)]
    return [heappop(ranked)[2] for _ in heap]
