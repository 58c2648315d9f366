"""First come, first served."""

from collections import deque

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.policy import PolicyParts, RequestQueue
from services.scheduler.core.request import Request


class FCFSPolicy:
    """Admits in the order of arrival, and preempts the request that was admitted last."""

    uses_priority = False
    retention = None

    def __init__(self, _parts: PolicyParts) -> None:
        """Needs nothing of the scheduler."""

    def create_request_queue(self) -> RequestQueue:
        return FCFSRequestQueue()

    def victim(self, running: RunningRequests) -> Request:
        return next(reversed(running))


class FCFSRequestQueue(deque[Request]):
    """Requests in the order of arrival, preempted requests first, the last of them at the head."""

    add = deque[Request].append
    prepend = deque[Request].appendleft

    def reorder(self) -> None:
        """Does nothing: no attribute of a request changes the order."""

    def put_in_order(self) -> None:
        """Does nothing: the queue is always in order."""
