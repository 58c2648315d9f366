"""Measures a process's silence, which is the time in which it could have replied but did not.

On a machine with more runnable threads than processors, threads wait for a processor before they
can reply. A fixed timeout would treat a starved process as hung. Silence therefore counts only
time in which the watched process and its watcher could both run:

1. Time in which a thread of the watched process waited for a processor does not count. Time in
   which the thread waited for the disk does not count if the machine stalled on memory or on input
   and output. A process that is stopped, in an endless loop or in a deadlock waits for neither, so
   all its time counts.
2. Time in which the watcher waited for a processor, or read later than planned, does not count. A
   reply may have arrived in that time without having been read.
3. If the watched process is unknown or not on this machine, the machine's run queue is used
   instead. With more than two runnable threads per processor, only a fraction of the time counts.
   The fraction is two times the number of processors, divided by the number of runnable threads.

A reading consists of counters. The difference of two readings shows which fraction of the interval
between them counts. For the time from the last reply to the first reading, the fraction is
estimated: first from the machine's run queue, and after the second reading as the fraction of the
interval between the first two readings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

CONFIRM_SECONDS = 0.25
"""Seconds between two readings of a silent process."""
_THREADS_PER_PROCESSOR = 2
"""A machine with more runnable threads per processor than this is overloaded."""


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """A thread's state, a letter as in proc(5), and its times in seconds since the thread started.
    `ran` is the time in which the thread ran. `waited` is the time in which the thread was runnable
    but waited for a processor.
    """

    state: str
    ran: float
    waited: float


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """Maps thread ids to the times of a process's threads."""

    threads: Mapping[int, ThreadTimes] = field(default_factory=dict)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return any(thread.state in ("T", "t") for thread in self.threads.values())

    @property
    def is_runnable(self) -> bool:
        """Whether any thread runs, or waits for a processor or the disk."""
        return any(thread.state in ("R", "D") for thread in self.threads.values())


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """The numbers of the machine's runnable threads and processors, and its stalled time. `stalled`
    is the number of seconds since boot in which some task stalled on memory or on input and output.
    """

    num_runnable: int = 0
    num_processors: int = 1
    stalled: float = 0.0

    @property
    def share(self) -> float:
        """The fraction of time that counts as silence. It is below 1 on an overloaded machine."""
        quiet = _THREADS_PER_PROCESSOR * self.num_processors
        return min(1.0, quiet / max(1, self.num_runnable))


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of the watcher, the machine, and the watched processes, if these are known."""

    now: float
    watcher: ProcessTimes = ProcessTimes()
    watched: Sequence[ProcessTimes] = ()
    machine: MachineTimes = MachineTimes()


class Silence:
    """The silence of a process since time `began`. `seconds` is the time that counts as silence. At
    most `longest_turn_seconds` count between two readings, because a watcher that reads later is
    itself delayed. At most `longest_first_seconds` count from `began` to the first reading.
    """

    def __init__(
        self, began: float, *, longest_first_seconds: float = inf, longest_turn_seconds: float = inf
    ) -> None:
        self.seconds = 0.0
        self._longest_first = longest_first_seconds
        self._longest_turn = longest_turn_seconds
        self._last: Reading | None = None
        self._began = began
        self._unjudged = 0.0
        """Seconds from `began` to the first reading. After the second reading, it is 0."""

    def look(self, reading: Reading) -> float:
        """Adds the time since the last reading to `seconds`. Returns `seconds`."""
        last, self._last = self._last, reading
        if last is None:
            elapsed = min(reading.now - self._began, self._longest_first)
            self._unjudged = elapsed
            is_stopped = _is_stopped(reading)
            self.seconds = elapsed * (1.0 if is_stopped else reading.machine.share)
            if not is_stopped and any(one.is_runnable for one in reading.watched):
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


def _is_stopped(reading: Reading) -> bool:
    return any(process.is_stopped for process in reading.watched)


def _counted(before: Reading, after: Reading, elapsed: float) -> float:
    """The number of seconds in which both the watched processes and the watcher could run."""
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
    """The longest wait of any of the process's threads for a processor or the disk."""
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
    if after.state == "R":  # the thread runs, or its current wait is not in the counter yet
        waited = max(waited, elapsed - ran)
    elif after.state == "D":
        waited += stalled
    return min(max(waited, 0.0), elapsed)
