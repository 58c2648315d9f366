"""Resources of a process: memory, threads, file descriptors and processor time."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_KIB = 1024
_CPUCLOCK_SCHED = 2
"""The kind of clock that measures a process's processor time. In Linux, a clock's id has this kind
in its lowest three bits, and the inverted process id in the others.
"""
CLIENT = "client"
"""The name of the benchmark's own process in tables of processor time."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The resource usage of a process at one time. `rss` and `pss` are in bytes. In `pss`, a page
    that n processes map counts as one n-th of its size.
    """

    rss: int
    pss: int
    num_threads: int
    num_files: int


def usage_of(pid: int) -> Usage:
    """The current usage of a process. Raises OSError if it has ended."""
    process = Path(f"/proc/{pid}")
    memory = _kib_fields((process / "smaps_rollup").read_text())
    return Usage(
        rss=memory["Rss"] * _KIB,
        pss=memory["Pss"] * _KIB,
        num_threads=len(list((process / "task").iterdir())),
        num_files=len(list((process / "fd").iterdir())),
    )


def is_running(pid: int) -> bool:
    """Whether the process exists, has not ended, and is not stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("T", "t", "Z", "X")


def processor_seconds(pid: int) -> float:
    """Processor seconds that a process has used so far, including its ended threads."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def processor_wait_seconds(pid: int, proc: Path = Path("/proc")) -> float:
    """The seconds for which the process's current threads have waited for a processor, in total.
    Linux has them in nanoseconds in the second field of a thread's schedstat.
    """
    nanos = 0
    for thread in (proc / str(pid) / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            nanos += int((thread / "schedstat").read_text().split()[1])
    return nanos / 1e9


def _kib_fields(text: str) -> dict[str, int]:
    fields = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(number) for name, number, _ in fields}
