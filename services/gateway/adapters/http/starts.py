"""When the requests that have come start: a few in each turn of the event loop, by turns."""

import asyncio
from collections import deque
from collections.abc import Callable

_REQUESTS_A_TURN = 4
"""So many start in one turn of the event loop; those that run have their turns between."""


class Starts:
    """Starts requests soon, those of one client in their order, and those of several by turns: one
    that sends many at once does not delay the others' until all of its own have started.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, deque[Callable[[], None]]] = {}
        """By client; the one that is next comes first."""

    def add(self, client: bytes, start: Callable[[], None]) -> None:
        """Calls `start` soon. `client` is what tells clients apart."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._start_some)
        self._waiting.setdefault(client, deque()).append(start)

    def _start_some(self) -> None:
        for _ in range(_REQUESTS_A_TURN):
            client = next(iter(self._waiting))
            starts = self._waiting.pop(client)
            start = starts.popleft()
            if starts:
                self._waiting[client] = starts
            start()
            if not self._waiting:
                return
        asyncio.get_running_loop().call_soon(self._start_some)
