"""How much of a process's silence counts against it: the time in which it could have answered.

On a machine with more runnable threads than processors, an answer takes as long as its threads wait
for a processor. A fixed timeout takes a starved process for one that hangs. Silence is therefore
counted in time that the watched process and its watcher could both run:

1. Time in which a thread of the watched process waited for a processor, or for the disk while the
   machine stalls on memory or input and output, does not count. An endless loop, a deadlock and a
   process that is stopped wait for neither: their time counts in full.
2. Time in which the watcher waited for a processor, or looked later than it meant to, does not
   count either: an answer may have arrived that nothing read.
3. Where the watched process is not on this machine, or not known, the machine's run queue stands
   for it: with more than two runnable threads for each processor, time counts by the share of a
   processor that one of two threads gets.

Readings are counters, and two of them make an interval. The interval between the last answer and
the first reading is counted like the first interval between two readings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

CONFIRM_SECONDS = 0.25
"""Between two readings of a process that is silent."""
_THREADS_PER_PROCESSOR = 2
"""Runnable threads for each processor up to which a machine is quiet."""


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """A thread: its state as in proc(5), and since its start the seconds in which it ran, and in
    which it was runnable and waited for a processor.
    """

    state: str
    ran: float
    waited: float


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """The threads of a process, by their ids."""

    threads: Mapping[int, ThreadTimes] = field(default_factory=dict)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return any(thread.state in ("T", "t") for thread in self.threads.values())

    @property
    def is_runnable(self) -> bool:
        """Whether a thread runs, or waits for a processor or the disk."""
        return any(thread.state in ("R", "D") for thread in self.threads.values())


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """The machine: runnable threads, processors, and seconds in which a task stalled on memory or
    on input and output, since the start.
    """

    num_runnable: int = 0
    num_processors: int = 1
    stalled: float = 0.0

    @property
    def share(self) -> float:
        """The share of a processor that a runnable thread gets, 1 on a quiet machine."""
        quiet = _THREADS_PER_PROCESSOR * self.num_processors
        return min(1.0, quiet / max(1, self.num_runnable))


@dataclass(frozen=True, slots=True)
class Reading:
    """One look: the time, the watcher, the watched processes, and the machine. No watched process
    means that none is known.
    """

    now: float
    watcher: ProcessTimes = ProcessTimes()
    watched: Sequence[ProcessTimes] = ()
    machine: MachineTimes = MachineTimes()


class Silence:
    """The silence of a process since `began`: `seconds` is the part that counts against it.

    More than `longest_turn_seconds` between two looks, and more than `longest_first_seconds` before
    the first one, are the watcher's own lateness.
    """

    def __init__(
        self,
        began: float,
        *,
        longest_first_seconds: float = inf,
        longest_turn_seconds: float = inf,
    ) -> None:
        self.seconds = 0.0
        self._longest_first = longest_first_seconds
        self._longest_turn = longest_turn_seconds
        self._last: Reading | None = None
        self._began = began
        self._unjudged = 0.0
        """Seconds before the first reading."""

    def look(self, reading: Reading) -> float:
        """Counts the time since the last look; returns `seconds`."""
        last, self._last = self._last, reading
        if last is None:
            elapsed = min(reading.now - self._began, self._longest_first)
            self._unjudged = elapsed
            self.seconds = elapsed * _share_at_once(reading)
            if _may_be_starved(reading):
                self.seconds = max(0.0, self.seconds - CONFIRM_SECONDS)
            return self.seconds
        elapsed = reading.now - last.now
        counted = _counted(last, reading, min(elapsed, self._longest_turn))
        if self._unjudged:
            share = counted / elapsed if elapsed > 0 else 0.0
            self.seconds = self._unjudged * min(share, 1.0)
            self._unjudged = 0.0
        self.seconds += counted
        return self.seconds


def _share_at_once(reading: Reading) -> float:
    """The share of time that counts before there is an interval."""
    return 1.0 if _is_stopped(reading) else reading.machine.share


def _may_be_starved(reading: Reading) -> bool:
    return not _is_stopped(reading) and any(one.is_runnable for one in reading.watched)


def _is_stopped(reading: Reading) -> bool:
    return any(process.is_stopped for process in reading.watched)


def _counted(before: Reading, after: Reading, elapsed: float) -> float:
    """Seconds of an interval in which the watched processes and the watcher could run."""
    excused = _waited(before.watcher, after.watcher, elapsed, 0.0)
    if _is_stopped(after):
        pass
    elif after.watched and len(after.watched) == len(before.watched):
        stalled = after.machine.stalled - before.machine.stalled
        excused += max(
            _waited(one, two, elapsed, stalled)
            for one, two in zip(before.watched, after.watched, strict=True)
        )
    else:
        excused = max(excused, elapsed * (1 - after.machine.share))
    return max(0.0, elapsed - excused)


def _waited(before: ProcessTimes, after: ProcessTimes, elapsed: float, stalled: float) -> float:
    """The longest time that a thread of the process waited for a processor or the disk."""
    new = ThreadTimes("R", 0.0, 0.0)
    return max(
        (
            _waited_of(before.threads.get(number, new), thread, elapsed, stalled)
            for number, thread in after.threads.items()
        ),
        default=0.0,
    )


def _waited_of(before: ThreadTimes, after: ThreadTimes, elapsed: float, stalled: float) -> float:
    ran, waited = after.ran - before.ran, after.waited - before.waited
    if after.state == "R":  # it runs, or is in a wait that the counter does not show yet
        waited = max(waited, elapsed - ran)
    elif after.state == "D":
        waited += stalled
    return min(max(waited, 0.0), elapsed)
