from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Event:
    """A scheduled call. Implements the gateway's Timer."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class EventClock:
    """Simulated time in seconds, and the scheduled calls. Implements the gateway's Clock. Calls at
    the same time run in the order in which they were scheduled.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def time(self) -> float:
        return self.now

    def nanos(self) -> int:
        return int(self.now * 1e9)

    def call_at(self, when: float, callback: Callable[[], object], /) -> Event:
        event = Event(callback)
        heappush(self._events, (when, next(self._numbers), event))
        return event

    def run(self) -> None:
        """Runs all calls in order of time."""
        events = self._events
        while events:
            when, _, event = heappop(events)
            callback = event.callback
            if callback is not None:
                self.now = max(self.now, when)
                callback()
