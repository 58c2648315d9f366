"""The processors that the machine, or the container around this process, gives."""

import os
from collections.abc import Collection
from pathlib import Path

from services.worker.platforms.control_groups import control_groups, read_text
from services.worker.platforms.threads import Processors


def usable_processors(
    proc: Path = Path("/proc"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    devices: Path = Path("/sys/devices/system/cpu"),
) -> Processors:
    """What this process may use, by its affinity and the control groups that it is in."""
    allowed = _allowed()
    return Processors(len(allowed), _num_cores(allowed, devices), _quota(proc, cgroup))


def _allowed() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _num_cores(allowed: Collection[int], devices: Path) -> int:
    """Cores of the processors; each counts as one where the machine does not say."""
    return len({_core(processor, devices) for processor in allowed})


def _core(processor: int, devices: Path) -> str:
    """The processors on the same core, as the kernel lists them."""
    topology = devices / f"cpu{processor}" / "topology"
    siblings = read_text(topology / "core_cpus_list") or read_text(
        topology / "thread_siblings_list"
    )
    return siblings.strip() or str(processor)


def _quota(proc: Path, cgroup: Path) -> float | None:
    """The least of the groups' limits, in seconds per second."""
    limits = []
    for group in control_groups(proc, cgroup, "cpu"):
        limit, _, period = read_text(group / "cpu.max").strip().partition(" ")
        if not limit:
            limit = read_text(group / "cpu.cfs_quota_us").strip()
            period = read_text(group / "cpu.cfs_period_us").strip()
        if limit.isdigit() and period.isdigit() and int(period):
            limits.append(int(limit) / int(period))
    return min(limits, default=None)
