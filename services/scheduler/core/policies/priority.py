"""By priority, and by arrival among requests of one priority."""

from bisect import insort

from services.scheduler.core.policies.policy import RequestQueue
from services.scheduler.core.request import Request
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


class PriorityRequestQueue(list[Request]):
    """Smallest (priority, arrival time, id) first, preempted or not.

    A sorted list: bisection and moving pointers take less time than the comparisons of a heap,
    which are made in Python.
    """

    def add(self, request: Request, /) -> None:
        insort(self, request, key=_rank)

    prepend = add

    def reorder(self, request: Request, /) -> None:
        """As in vLLM, one at the head keeps its place."""
        if self[0] is not request:
            self.remove(request)
            self.add(request)
