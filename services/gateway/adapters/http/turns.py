"""Calls that can wait, of which some are made in each turn of the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

_SHARE = 0.5
"""Of the processor time that everything else in a turn took, so much may be added to it."""


class Turns:
    """Calls in their order, one in each turn of the event loop, however many wait: what else there
    is to be done has its turns between them. Where turns are long for other reasons, more are made,
    for half of that time, so that those that wait do not become ever more.
    """

    def __init__(self, processor_seconds: Callable[[], float] = time.thread_time) -> None:
        """`processor_seconds` is what the event loop's thread has used."""
        self._processor_seconds = processor_seconds
        self._calls: deque[Callable[[], None]] = deque()
        self._ended = 0.0
        """When the last turn's calls had been made, in processor time."""

    def add(self, call: Callable[[], None]) -> None:
        """Makes a call soon."""
        if not self._calls:
            self._next_turn()
        self._calls.append(call)

    def _next_turn(self) -> None:
        self._ended = self._processor_seconds()
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        began = self._processor_seconds()
        until = began + _SHARE * (began - self._ended)
        try:
            for num_made in range(len(self._calls)):
                if num_made and self._processor_seconds() >= until:
                    break
                self._calls.popleft()()
        finally:
            if self._calls:
                self._next_turn()
