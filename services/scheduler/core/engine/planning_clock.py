"""Decides when the next step is planned while another step runs."""

from bisect import bisect_left, insort
from collections import deque

RECENT_STEPS = 64
MIN_STEPS = 8
"""Planning is delayed only after this number of steps with a similar size was measured."""
MARGIN_SECONDS = 0.001
"""The precision of an event loop's timers, which is subtracted from the delay of planning."""
LEAST_SECONDS = 0.003
"""The shortest delay of planning, because a shorter sleep would cost more than it saves."""
_OUTLIERS = 16
"""One in this number of recent steps may have less room (see `PlanningClock`) than assumed."""


class PlanningClock:
    """Delays the planning of a step while the previous step runs, so that the step includes
    requests that arrive during the delay. Planning starts early enough that workers do not wait.

    Workers report the *slack* of each step: the time from when the step was ready to run until the
    previous step ended. Slack is negative if the step arrived late. The slack of a step plus the
    delay of its planning is the *room* of the previous step: the time after the previous step's
    start by which planning can be delayed without making the workers wait. The room depends on how
    long the previous step, planning and messages take.

    Steps are grouped in size classes, one for each power of two tokens. Let r be the room that 15
    of 16 recent steps of the class had at least, and m the median of their rooms. The delay is
    r - (m - r), minus a margin. If rooms vary much, as on a busy machine, the delay is short or 0.
    Planning begins at the latest when the previous step ends.

    Times are in seconds of a monotonic clock, which callers read.
    """

    def __init__(self) -> None:
        self.num_planned = 0
        """Number of steps that were planned while another step ran."""
        self.seconds_put_off = 0.0
        """Total delay of planning, in seconds."""
        self.seconds_late = 0.0
        """Total time that workers waited because steps arrived late, in seconds."""
        self._rooms: dict[int, _Rooms] = {}
        self._size = 0
        self._began = 0.0
        self._due = 0.0
        self._planned: dict[int, tuple[int, float]] = {}

    @property
    def due(self) -> float:
        """The time at which the next step should be planned."""
        return self._due

    def begins(self, num_tokens: int, now: float) -> None:
        """Records that a step of `num_tokens` tokens begins to run at the time `now`."""
        self._size, self._began = num_tokens.bit_length(), now
        rooms = self._rooms.get(self._size)
        seconds = 0.0 if rooms is None else rooms.usable - MARGIN_SECONDS
        self._due = now + seconds if seconds >= LEAST_SECONDS else now

    def planned(self, step: int, began: float) -> None:
        """Records a step whose planning began at the time `began`, while another step ran."""
        put_off = max(0.0, min(began, self._due) - self._began)
        self._planned[step] = self._size, put_off
        self.num_planned += 1
        self.seconds_put_off += put_off

    def answered(self, step: int, slack_seconds: float | None) -> None:
        """Records a step's slack, if the step was planned while another step ran."""
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
        """Removes all measurements, because new workers may have other step times."""
        self._rooms.clear()
        self._planned.clear()


class _Rooms:
    """The rooms (see PlanningClock) of the recent steps of one size class."""

    def __init__(self) -> None:
        self.usable = 0.0
        """Seconds by which planning can be delayed. 0 until `MIN_STEPS` rooms are known."""
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, room: float) -> None:
        """Adds the room of a step. Removes the oldest room if RECENT_STEPS rooms are stored."""
        if len(self._recent) == RECENT_STEPS:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(room)
        insort(self._sorted, room)
        if (number := len(self._recent)) >= MIN_STEPS:
            nearly_all, median = self._sorted[number // _OUTLIERS], self._sorted[number // 2]
            self.usable = nearly_all - (median - nearly_all)
