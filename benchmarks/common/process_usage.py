"""Resources of a process: memory, threads, file descriptors and processor time."""

from dataclasses import dataclass
from pathlib import Path

_KIB = 1024
CLIENT = "client"
"""The name of the benchmark's own process in tables of processor time."""


@dataclass(frozen=True, slots=True)
class Usage:
    """A process at one moment. `rss` and `pss` in bytes; of pages that several processes map, `pss`
    counts its share.
    """

    rss: int
    pss: int
    num_threads: int
    num_files: int


def usage_of(pid: int, proc: Path = Path("/proc")) -> Usage:
    """What the process holds now. Raises OSError when it has ended."""
    process = proc / str(pid)
    memory = _kib_fields((process / "smaps_rollup").read_text())
    return Usage(
        rss=memory["Rss"] * _KIB,
        pss=memory["Pss"] * _KIB,
        num_threads=len(list((process / "task").iterdir())),
        num_files=len(list((process / "fd").iterdir())),
    )


def processor_seconds(pid: int) -> float:
    """Processor time that the threads of a process have used so far, as its kernel accounts it."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def _kib_fields(text: str) -> dict[str, int]:
    """The lines `Name:  number kB`."""
    fields = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(number) for name, number, _ in fields}
