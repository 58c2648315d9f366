"""Starts requests that have arrived: a few per iteration of the event loop, clients in rotation."""

import asyncio
from collections import deque
from collections.abc import Callable

_REQUESTS_A_TURN = 4
"""Requests started in one iteration of the event loop, so that running requests progress in
between.
"""


class Starts:
    """Starts the first requests of an iteration at once and the others soon. The requests of one
    client start in their order, and clients alternate: a client with many requests does not delay
    other clients until all of its own have started.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, deque[Callable[[], None]]] = {}
        """Waiting starts by client; the first client is the next to be served."""
        self._num_started = 0
        """Requests started since the last call of `_turn`."""

    def add(self, client: bytes, start: Callable[[], None]) -> None:
        """Calls `start`, now or soon. `client` identifies the client."""
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
