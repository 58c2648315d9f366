"""What the machine, or the container around this process, gives: memory and processors."""

import os
from pathlib import Path

_KIB = 1024
_GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_memory_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that can still be used: of the machine, and within the limit of the control group.

    Both versions of control groups are understood; in the second, limits of enclosing groups too.
    """
    amounts = [_machine_available(proc)]
    for group in _control_groups(proc, cgroup):
        for limit_name, usage_name in _GROUP_FILES:
            limit, usage = _read_int(group / limit_name), _read_int(group / usage_name)
            if limit is not None and usage is not None:
                reclaimable = _stat(group / "memory.stat", "inactive_file")
                amounts.append(max(limit - usage + reclaimable, 0))
    return min(amounts)


def usable_processors() -> int:
    """Processors that this process may run on, within the quota of the control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, _, period = _read_text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        return max(min(allowed or 1, -(-int(quota) // int(period))), 1)
    return allowed or 1


def _control_groups(proc: Path, cgroup: Path) -> list[Path]:
    """Where this process's limits may stand: its group and those around it."""
    groups = [cgroup, cgroup / "memory"]
    for line in _read_text(proc / "self/cgroup").splitlines():
        hierarchy, _, path = line.partition("::")
        if hierarchy == "0":
            own = cgroup / path.lstrip("/")
            groups += [group for group in (own, *own.parents) if group.is_relative_to(cgroup)]
    return groups


def _machine_available(proc: Path) -> int:
    kib = _stat(proc / "meminfo", "MemAvailable:")
    if kib:
        return kib * _KIB
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _stat(path: Path, key: str) -> int:
    for line in _read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value.split()[0])
    return 0


def _read_int(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
