"""The memory and processors that the machine or container allows this process."""

import os
from collections.abc import Collection
from pathlib import Path

from services.worker.platforms.threads import Processors

_KIB = 1024
_GROUP_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def available_memory_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """The minimum of the machine's available memory and the memory left within the process's
    control groups and their parents, in bytes.
    """
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    amounts = [_stat(proc / "meminfo", "MemAvailable:") * _KIB or pages]
    for group in _control_groups(proc, cgroup, "memory"):
        for limit_name, usage_name in _GROUP_FILES:
            limit, usage = _read_int(group / limit_name), _read_int(group / usage_name)
            if limit is not None and usage is not None:
                reclaimable = _stat(group / "memory.stat", "inactive_file")
                amounts.append(max(limit - usage + reclaimable, 0))
    return min(amounts)


def _stat(path: Path, key: str) -> int:
    for line in _read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value.split()[0])
    return 0


def _read_int(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def usable_processors(
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    devices: Path = Path("/sys/devices/system/cpu"),
) -> Processors:
    """The processors that this process may use, by its affinity mask and its control groups."""
    allowed: Collection[int] = range(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
    num_cores = len({_core(processor, devices) for processor in allowed})
    return Processors(len(allowed), num_cores, _quota(proc, cgroup))


def _core(processor: int, devices: Path) -> str:
    """The processors on the same core as this one, as the text of the kernel's list. If there is no
    list, the processor counts as a core.
    """
    topology = devices / f"cpu{processor}" / "topology"
    siblings = _read_text(topology / "core_cpus_list") or _read_text(
        topology / "thread_siblings_list"
    )
    return siblings.strip() or str(processor)


def _quota(proc: Path, cgroup: Path) -> float | None:
    """The smallest processor-time limit of the process's control groups, in seconds of processor
    time per second. It is None if no group has a limit.
    """
    limits = []
    for group in _control_groups(proc, cgroup, "cpu"):
        limit, _, period = _read_text(group / "cpu.max").strip().partition(" ")
        if not limit:
            limit = _read_text(group / "cpu.cfs_quota_us").strip()
            period = _read_text(group / "cpu.cfs_period_us").strip()
        if limit.isdigit() and period.isdigit() and int(period):
            limits.append(int(limit) / int(period))
    return min(limits, default=None)


def _control_groups(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """Directories that may contain the controller's limits: those of the process's control group
    and of its parents, in both versions of control groups. The root directory is included, because
    a container's limits are there.
    """
    groups = [cgroup, cgroup / controller]
    for line in _read_text(proc / "self/cgroup").splitlines():
        hierarchy, controllers, path = (*line.split(":", 2), "", "")[:3]
        if hierarchy == "0":
            root = cgroup
        elif controller in controllers.split(","):
            root = cgroup / controller
        else:
            continue
        own = root / path.lstrip("/")
        groups += [group for group in (own, *own.parents) if group.is_relative_to(root)]
    return list(dict.fromkeys(groups))


def _read_text(path: Path) -> str:
    """A file's text. It is empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
