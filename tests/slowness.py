"""How slow the machine is, for tests of how long something takes.

Waits for what must come have a minute, on any machine. A bound on time that a test is about is
multiplied by one of these.
"""

import time
from collections.abc import Callable
from pathlib import Path

_REFERENCE_SECONDS = 0.008
_SCHEDULED = Path("/proc/thread-self/schedstat")


def slowness() -> float:
    """The time that this processor takes for a fixed sum, to that of a current server's; at least
    1.
    """
    return max(1.0, min(_taken(time.thread_time)) / _REFERENCE_SECONDS)


def busy_slowness() -> float:
    """The same of the elapsed time on average, which is longer where others use the processor."""
    return max(1.0, sum(taken := _taken(time.perf_counter)) / len(taken) / _REFERENCE_SECONDS)


def seconds_without_processor() -> float:
    """For how long this thread has been ready to run while others ran, as far as Linux tells; 0.0
    elsewhere.
    """
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
