"""A queue of low-priority calls, a few of which run in each iteration of the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

_SHARE = 0.5
"""Limit on the processor time of these calls, as a fraction of the processor time of everything
else in the iteration.
"""


class DeferredCalls:
    """Runs calls in the order of `add`, one in each iteration of the event loop, so that a burst of
    calls delays everything else by at most one call. After a long iteration, more calls run. They
    may take half of the processor time that everything else took since the last call. Without this
    rule the queue would grow under load.
    """

    def __init__(self, processor_seconds: Callable[[], float] = time.thread_time) -> None:
        """`processor_seconds` returns the processor time of the event loop's thread, in seconds."""
        self._processor_seconds = processor_seconds
        self._calls: deque[Callable[[], None]] = deque()
        self._ended = 0.0
        """The thread's processor time, in seconds, when the last of these calls ended."""

    def add(self, call: Callable[[], None]) -> None:
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
