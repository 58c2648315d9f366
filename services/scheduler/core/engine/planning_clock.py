"""Decides when the next step is planned while another step runs."""

from bisect import bisect_left, insort
from collections import deque

RECENT_STEPS = 64
MIN_STEPS = 8
"""Number of steps of a size class that must be measured before planning is delayed."""
MARGIN_SECONDS = 0.001
"""The precision of an event loop's timers, in seconds. It is subtracted from the delay."""
LEAST_SECONDS = 0.003
"""The shortest delay of planning, in seconds. A shorter sleep costs more than it saves."""
_OUTLIERS = 16
"""One in this number of recent steps may have less room than "nearly all steps" have."""


class PlanningClock:
    """Delays the planning of a step while the previous step runs, so that requests that arrive
    during the delay are part of the step. Planning starts early enough that workers do not wait.

    Workers report the slack of each step: the time from when the step was ready to run until the
    end of the previous step. Slack is negative if the step arrived late. The slack of a step plus
    the delay of its planning is the *room* of the previous step: the time from its start in which
    the next step need not be planned. The room depends on the durations of that previous step, of
    planning, and of messages.

    Steps are grouped in size classes, one for each power of two tokens. The delay is the room that
    nearly all recent steps of the class had, minus the distance between this room and the median
    room, minus a margin. If times vary, as on a busy machine, the delay is short or 0. Planning
    begins at the latest at the end of the previous step. In that case workers wait for as long as
    planning and messages take.

    Times are seconds of a monotonic clock, which callers pass in.
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
        """The time at which the step after the running step should be planned."""
        return self._due

    def begins(self, num_tokens: int, now: float) -> None:
        """Records that a step of `num_tokens` tokens begins to run at about `now`."""
        self._size, self._began = num_tokens.bit_length(), now
        rooms = self._rooms.get(self._size)
        seconds = 0.0 if rooms is None else rooms.usable - MARGIN_SECONDS
        self._due = now + seconds if seconds >= LEAST_SECONDS else now

    def planned(self, step: int, began: float) -> None:
        """Records a sent step whose planning began at `began`, while another step was running."""
        put_off = max(0.0, min(began, self._due) - self._began)
        self._planned[step] = self._size, put_off
        self.num_planned += 1
        self.seconds_put_off += put_off

    def answered(self, step: int, slack_seconds: float | None) -> None:
        """Records a step's slack if it was measured while another step ran."""
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
        """Removes all measurements, because other workers may run the next steps."""
        self._rooms.clear()
        self._planned.clear()


class _Rooms:
    """The rooms of the recent steps of one size class, in order of time and sorted."""

    def __init__(self) -> None:
        self.usable = 0.0
        """The room in seconds that nearly all steps had, less a margin. 0 before MIN_STEPS."""
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, room: float) -> None:
        """Adds the room of a step. Drops the oldest room if RECENT_STEPS are stored."""
        if len(self._recent) == RECENT_STEPS:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(room)
        insort(self._sorted, room)
        if (number := len(self._recent)) >= MIN_STEPS:
            nearly_all, median = self._sorted[number // _OUTLIERS], self._sorted[number // 2]
            self.usable = nearly_all - (median - nearly_all)
