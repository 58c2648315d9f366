"""Calls that can wait, of which some are made in each turn of the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

_CALLS_A_TURN = 4
_PART = 4
"""One in so many of those that wait, where that is more, so that none waits for long."""


class Turns:
    """Calls in their order. What else there is to be done has its turns between them."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()

    def add(self, call: Callable[[], None]) -> None:
        """Makes a call soon."""
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._turn)
        self._calls.append(call)

    def _turn(self) -> None:
        num_calls = len(self._calls)
        for _ in range(min(num_calls, max(_CALLS_A_TURN, num_calls // _PART))):
            self._calls.popleft()()
        if self._calls:
            asyncio.get_running_loop().call_soon(self._turn)
