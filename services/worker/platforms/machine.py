"""Determines how much memory the machine or the container still has for this process."""

import os
from pathlib import Path

from services.common.process.processors import control_groups, read_text

_KIB = 1024
_GROUP_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def available_memory_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """The machine's available memory, or what its control groups and their parents leave to this
    process, whichever is smallest, in bytes.
    """
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    amounts = [_stat(proc / "meminfo", "MemAvailable:") * _KIB or pages]
    for group in control_groups(proc, cgroup, "memory"):
        for limit_name, usage_name in _GROUP_FILES:
            limit, usage = _read_int(group / limit_name), _read_int(group / usage_name)
            if limit is not None and usage is not None:
                reclaimable = _stat(group / "memory.stat", "inactive_file")
                amounts.append(max(limit - usage + reclaimable, 0))
    return min(amounts)


def _stat(path: Path, key: str) -> int:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value.split()[0])
    return 0


def _read_int(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None
