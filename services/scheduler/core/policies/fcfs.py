"""First come, first served."""

from collections import deque
from collections.abc import Iterator

from services.scheduler.core.request import Request
from services.scheduler.core.request_queue import RequestQueue
from services.scheduler.core.running_requests import RunningRequests


class FCFSPolicy:
    """Admits in the order of arrival, and preempts the request that was admitted last."""

    uses_priority = False

    def create_request_queue(self) -> RequestQueue:
        return FCFSRequestQueue()

    def victim(self, running: RunningRequests) -> Request:
        return next(reversed(running))


class FCFSRequestQueue:
    """Requests in the order of arrival; those that were preempted come first, the last one of them
    at the head.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def prepend(self, request: Request) -> None:
        self._requests.appendleft(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
