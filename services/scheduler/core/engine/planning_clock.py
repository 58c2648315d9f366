"""When the next step is planned while one runs."""

from bisect import bisect_left, insort
from collections import deque

RECENT_STEPS = 64
MIN_STEPS = 8
"""With fewer of a size, steps are planned at once."""
MARGIN_SECONDS = 0.001
"""Timers of event loops are no more exact."""
LEAST_SECONDS = 0.003
"""Shortest time by which planning is put off: each further sleep costs processor time."""
_OUTLIERS = 16
"""Of the recent steps, all but one in 16 had at least the room that "nearly all" had."""


class PlanningClock:
    """Puts the planning of a step off while the one before it runs, so that requests which arrive
    meanwhile are part of it, and lets it begin early enough that the workers do not wait.

    Workers report the slack of each step: the time from when it was ready to run to the end of the
    step before it, less than 0 if it came late. The slack plus the time for which planning was put
    off is the *room* of the step before: the time from its start, as it is seen here, in which
    nothing has to be planned. It depends on how long that step runs, and on how long planning and
    messages take. For each class of sizes, one for each power of two, planning is put off by the
    room that nearly all recent steps had, less its distance from the median, and less a margin.
    Where times vary, as on a busy machine, steps are planned early, or at once. The latest time is
    the end of the step before: then workers wait for as long as planning and messages take.

    Times are seconds of one steady clock, which callers pass in.
    """

    def __init__(self) -> None:
        self.num_planned = 0
        """Steps that were planned while another one ran."""
        self.seconds_put_off = 0.0
        """Sum of the times by which these were planned later than they could have been."""
        self.seconds_late = 0.0
        """Sum of the times in which workers had no step to run, since one of these came late."""
        self._rooms: dict[int, _Rooms] = {}
        self._size = 0
        self._began = 0.0
        self._due = 0.0
        self._planned: dict[int, tuple[int, float]] = {}

    @property
    def due(self) -> float:
        """When the step after the one that runs is to be planned."""
        return self._due

    def begins(self, num_tokens: int, now: float) -> None:
        """A step of `num_tokens` begins to run at about `now`."""
        self._size, self._began = num_tokens.bit_length(), now
        rooms = self._rooms.get(self._size)
        seconds = 0.0 if rooms is None else rooms.usable - MARGIN_SECONDS
        self._due = now + seconds if seconds >= LEAST_SECONDS else now

    def planned(self, step: int, began: float) -> None:
        """A step was sent whose planning began at `began`, during the step of the last `begins`."""
        put_off = max(0.0, min(began, self._due) - self._began)
        self._planned[step] = self._size, put_off
        self.num_planned += 1
        self.seconds_put_off += put_off

    def answered(self, step: int, slack_seconds: float | None) -> None:
        """A step is done whose workers reported this slack, or None where it is not measured. Does
        nothing if no step ran when this one was planned.
        """
        planned = self._planned.pop(step, None)
        if planned is None or slack_seconds is None:
            return
        size, put_off = planned
        rooms = self._rooms.get(size)
        if rooms is None:
            rooms = self._rooms[size] = _Rooms()
        rooms.add(put_off + slack_seconds)
        self.seconds_late += max(0.0, -slack_seconds)

    def forget(self) -> None:
        """Steps in flight are not answered, and other workers may run the next ones."""
        self._rooms.clear()
        self._planned.clear()


class _Rooms:
    """The room of each of the recent steps of one size, kept in the order of time and of size."""

    def __init__(self) -> None:
        self.usable = 0.0
        """The room that nearly all of them had, less its distance from the median; 0 while there
        are fewer than MIN_STEPS.
        """
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, room: float) -> None:
        """Adds the room of a step, in place of that of the oldest one if there are enough."""
        if len(self._recent) == RECENT_STEPS:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(room)
        insort(self._sorted, room)
        if (number := len(self._recent)) >= MIN_STEPS:
            nearly_all, median = self._sorted[number // _OUTLIERS], self._sorted[number // 2]
            self.usable = nearly_all - (median - nearly_all)
