"""When the requests that have come start: a few in each turn of the event loop, by turns."""

import asyncio
from collections import deque
from collections.abc import Callable

_REQUESTS_A_TURN = 4
"""Requests that start in one turn of the event loop, so that running ones go on between."""


class Starts:
    """Starts the first requests of a turn at once and others soon, those of one client in their
    order, and those of several by turns: one that sends many at once does not delay the others'
    until all of its own have started.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, deque[Callable[[], None]]] = {}
        """By client; the one that is next comes first."""
        self._num_started = 0
        """In this turn, and where requests wait, before the next."""

    def add(self, client: bytes, start: Callable[[], None]) -> None:
        """Calls `start`, now or soon. `client` is what tells clients apart."""
        if not self._num_started:
            asyncio.get_running_loop().call_soon(self._turn)
        if self._num_started < _REQUESTS_A_TURN:
            self._num_started += 1
            start()
        else:
            self._waiting.setdefault(client, deque()).append(start)

    def _turn(self) -> None:
        self._num_started = min(_REQUESTS_A_TURN, sum(map(len, self._waiting.values())))
        if self._num_started:
            asyncio.get_running_loop().call_soon(self._turn)
        for _ in range(self._num_started):
            client = next(iter(self._waiting))
            starts = self._waiting.pop(client)
            start = starts.popleft()
            if starts:
                self._waiting[client] = starts
            start()
