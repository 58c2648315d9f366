"""The queue of waiting requests."""

from collections.abc import Iterator
from typing import Protocol

from services.scheduler.core.request import Request


class RequestQueue(Protocol):
    """Waiting requests. Iterates in the order of admission, from the head."""

    def add(self, request: Request) -> None:
        """Queues a request that arrived."""

    def prepend(self, request: Request) -> None:
        """Queues a request that was preempted: at the head, if the order does not place it."""

    def remove(self, request: Request) -> None:
        """Takes a request out. Raises ValueError if it is not in the queue."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...
