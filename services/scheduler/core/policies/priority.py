"""The policy `priority` orders requests by priority, then by arrival time."""

from bisect import insort
from heapq import heappop, heappush

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.policy import PolicyParts, RequestQueue
from services.scheduler.core.request import Request


class PriorityPolicy:
    """Admits requests in the order of (priority, arrival time). Preempts the last in this order."""

    uses_priority = True
    retention = None

    def __init__(self, _parts: PolicyParts) -> None: ...

    def create_request_queue(self) -> RequestQueue:
        return PriorityRequestQueue()

    def victim(self, running: RunningRequests) -> Request:
        return max(running, key=lambda request: (request.priority, request.arrival_time))


def _rank(request: Request) -> tuple[int, float, str]:
    return request.priority, request.arrival_time, request.request_id


class PriorityRequestQueue(list[Request]):
    """Waiting requests, sorted by (priority, arrival time, id), the smallest first. Preempted
    requests are treated like others. A sorted list is faster than a heap, because a heap makes more
    comparisons, and Python code compares the requests.
    """

    def add(self, request: Request, /) -> None:
        insort(self, request, key=_rank)

    prepend = add

    has_misplaced = False
    """Whether a request's priority or arrival time has changed since the queue was last sorted."""

    def reorder(self) -> None:
        """Puts the requests in the order in which vLLM's heap would return them. vLLM moves a
        request only when requests are added or removed, and not when its rank changes.
        """
        self.has_misplaced = True
        self[:] = _given_out([self[index] for index in _layout(len(self))])

    def put_in_order(self) -> None:
        if self.has_misplaced:
            self.has_misplaced = False
            self.sort(key=_rank)


def _layout(count: int) -> list[int]:
    """A heap into which the indexes below `count` were pushed in reverse order, as a list."""
    heap: list[int] = []
    for index in reversed(range(count)):
        heappush(heap, index)
    return heap


def _given_out(heap: list[Request]) -> list[Request]:
    """The requests of a heap, which may contain one misplaced request, in popping order."""
    ranked = [(_rank(request), index, request) for index, request in enumerate(heap)]
    return [heappop(ranked)[2] for _ in heap]
