"""An example of a scheduling policy in a package of its own, as docs/simulation.md describes it."""

from bisect import insort

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.policy import PolicyParts
from services.scheduler.core.request import Request


def _length(request: Request) -> int:
    return request.num_prompt_tokens


class _Queue(list[Request]):
    def add(self, request: Request, /) -> None:
        insort(self, request, key=_length)

    prepend = add

    def put_in_order(self) -> None:
        self.sort(key=_length)

    reorder = put_in_order


class ShortestPromptFirst:
    """Admits the request with the shortest prompt first, and preempts the one with the longest."""

    uses_priority = False
    retention = None

    def __init__(self, _parts: PolicyParts) -> None: ...

    def create_request_queue(self) -> _Queue:
        return _Queue()

    def victim(self, running: RunningRequests) -> Request:
        return max(running, key=_length)
