"""Starts the requests that have arrived, a few in each iteration of the event loop. The clients are
served in turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable

_REQUESTS_A_TURN = 4
"""Number of requests that are started in one iteration of the event loop. Running requests progress
between iterations.
"""


class Starts:
    """Starts the first requests of an iteration at once and the others in later iterations. The
    requests of one client start in the order of arrival. Clients alternate, so that a client with
    many requests does not delay the requests of other clients.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, deque[Callable[[], None]]] = {}
        """Maps each client to its delayed calls of `start`. The first client is served next."""
        self._num_started = 0
        """Number of requests that were started in this iteration of the event loop."""

    def add(self, client: bytes, start: Callable[[], None]) -> None:
        """Calls `start`, at once or in a later iteration of the event loop. `client` identifies the
        client.
        """
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
