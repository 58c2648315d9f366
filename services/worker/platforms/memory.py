"""The memory that the machine, or the container around this process, gives."""

import os
from pathlib import Path

from services.worker.platforms.control_groups import control_groups, read_text

_KIB = 1024
_GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_memory_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that can still be used: of the machine, and within the limit of the control group.

    Limits of enclosing groups count too.
    """
    amounts = [_machine_available(proc)]
    for group in control_groups(proc, cgroup, "memory"):
        for limit_name, usage_name in _GROUP_FILES:
            limit, usage = _read_int(group / limit_name), _read_int(group / usage_name)
            if limit is not None and usage is not None:
                reclaimable = _stat(group / "memory.stat", "inactive_file")
                amounts.append(max(limit - usage + reclaimable, 0))
    return min(amounts)


def _machine_available(proc: Path) -> int:
    kib = _stat(proc / "meminfo", "MemAvailable:")
    if kib:
        return kib * _KIB
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _stat(path: Path, key: str) -> int:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value.split()[0])
    return 0


def _read_int(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None
