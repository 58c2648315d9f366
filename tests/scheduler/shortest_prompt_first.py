"""An example of a scheduling policy. It also needs one line in the table of policies."""

from bisect import insort

from services.scheduler.core.planning.running_requests import RunningRequests
from services.scheduler.core.policies.policy import PolicyParts, RequestQueue
from services.scheduler.core.request import Request


class ShortestPromptFirstPolicy:
    uses_priority = False
    retention = None

    def __init__(self, _parts: PolicyParts) -> None: ...

    def create_request_queue(self) -> RequestQueue:
        return ShortestPromptFirstQueue()

    def victim(self, running: RunningRequests) -> Request:
        return max(running, key=lambda request: request.num_prompt_tokens)


class ShortestPromptFirstQueue(list[Request]):
    def add(self, request: Request, /) -> None:
        insort(self, request, key=lambda queued: queued.num_prompt_tokens)

    prepend = add

    def reorder(self) -> None:
        self.put_in_order()

    def put_in_order(self) -> None:
        self.sort(key=lambda queued: queued.num_prompt_tokens)
