"""Measures how slow the machine is, for tests of durations.

A test that waits for an event waits up to a minute on any machine. A test of a time limit
multiplies the limit by a factor of this module.
"""

import time
from collections.abc import Callable
from pathlib import Path

_REFERENCE_SECONDS = 0.008
_SCHEDULED = Path("/proc/thread-self/schedstat")


def slowness() -> float:
    """The time of a fixed computation divided by a current server's time, but at least 1."""
    return max(1.0, min(_taken(time.thread_time)) / _REFERENCE_SECONDS)


def busy_slowness() -> float:
    """Like `slowness`, but by mean elapsed time, which includes other processes' work."""
    return max(1.0, sum(taken := _taken(time.perf_counter)) / len(taken) / _REFERENCE_SECONDS)


def seconds_without_processor() -> float:
    """The time that this thread has waited for a processor. 0.0 on systems other than Linux."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _taken(clock: Callable[[], float]) -> list[float]:
    taken = []
    for _ in range(5):
        began = clock()
        sum(number & 3 for number in range(250_000))
        taken.append(clock() - began)
    return taken
