"""First come, first served."""

from collections import deque

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.policy import PolicyParts, RequestQueue
from services.scheduler.core.request import Request


class FCFSPolicy:
    """Admits requests in the order of arrival, and preempts the request that was admitted last."""

    uses_priority = False
    retention = None

    def __init__(self, _parts: PolicyParts) -> None: ...

    def create_request_queue(self) -> RequestQueue:
        return FCFSRequestQueue()

    def victim(self, running: RunningRequests) -> Request:
        return next(reversed(running))


class FCFSRequestQueue(deque[Request]):
    """Preempted requests, the last preempted first, then other requests by arrival."""

    add = deque[Request].append
    prepend = deque[Request].appendleft

    def reorder(self) -> None:
        """Does nothing, because the order does not depend on attributes that change."""

    def put_in_order(self) -> None:
        """Does nothing, because the queue is always in order."""
