"""A queue of calls with low priority, of which some are made in each turn of the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

_SHARE = 0.5
"""Processor time for these calls, as a part of what everything else in the turn took."""


class Turns:
    """Makes calls in their order, one in each turn of the event loop, so that a burst of them
    delays nothing else by more than one call. After a long turn it makes more, until they have
    taken half of the time that the rest of the turn took: else the queue would grow under load.
    """

    def __init__(self, processor_seconds: Callable[[], float] = time.thread_time) -> None:
        """`processor_seconds` returns the processor time of the event loop's thread."""
        self._processor_seconds = processor_seconds
        self._calls: deque[Callable[[], None]] = deque()
        self._ended = 0.0
        """The processor time at the end of the last turn's calls."""

    def add(self, call: Callable[[], None]) -> None:
        """Appends a call to the queue."""
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
