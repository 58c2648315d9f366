"""An example of a new scheduling policy: all that it takes, but for a line in the table."""

from collections.abc import Iterator

from services.scheduler.core.request import Request
from services.scheduler.core.request_queue import RequestQueue
from services.scheduler.core.running_requests import RunningRequests


class ShortestPromptFirstPolicy:
    """Admits the shortest prompt first, and preempts the request with the longest."""

    uses_priority = False

    def create_request_queue(self) -> RequestQueue:
        return ShortestPromptFirstQueue()

    def victim(self, running: RunningRequests) -> Request:
        return max(running, key=lambda request: request.num_prompt_tokens)


class ShortestPromptFirstQueue:
    """Requests in the order of their prompts' lengths."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self._requests.sort(key=lambda queued: queued.num_prompt_tokens)

    prepend = add

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
