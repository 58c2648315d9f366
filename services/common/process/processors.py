"""Finds the processors that this process may use, from its affinity mask, the online processors,
and the limits of its control groups (cgroups).
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Processor:
    """A logical processor. `core` is the lowest number of the processors on the same physical core.
    `node` is the number of the processor's NUMA node.
    """

    number: int
    core: int
    node: int = 0


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors that a process may use, in ascending order. `quota` limits the processor time
    in seconds per second. None means no limit.
    """

    allowed: tuple[Processor, ...]
    quota: float | None = None

    @property
    def num_allowed(self) -> int:
        return len(self.allowed)

    @property
    def num_cores(self) -> int:
        return len({processor.core for processor in self.allowed})

    def within_quota(self, number: int) -> int:
        """The number of threads, at most `number`, that can use the whole quota. The quota is
        rounded up, as in the Go runtime and the JVM, since with a quota of 1.5 a single thread
        would leave a third unused.
        """
        return number if self.quota is None else min(number, max(math.ceil(self.quota), 1))


def usable_processors(root: Path = Path("/")) -> Processors:
    """The processors that this process may use. `root` is the directory with `proc` and `sys`."""
    proc, system = root / "proc", root / "sys/devices/system"
    online = cpu_list(read_text(system / "cpu/online"))
    allowed = cpu_list(_status(proc, "Cpus_allowed_list")) or os.sched_getaffinity(0)
    nodes = _nodes(system / "node")
    return Processors(
        tuple(
            Processor(number, _core(number, system / "cpu"), nodes.get(number, 0))
            for number in sorted(allowed & online if online else allowed)
        ),
        _quota(proc, root / "sys/fs/cgroup"),
    )


def cpu_list(text: str) -> set[int]:
    """Parses a list of processors in the kernel's format, such as 0-3,8."""
    numbers = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def control_groups(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """The directories that may contain the controller's limits: the directories of this process's
    control group and of all groups above it, in both versions of control groups. The root directory
    is included, because a container's limits are there.
    """
    groups = [cgroup, cgroup / controller]
    for line in read_text(proc / "self/cgroup").splitlines():
        hierarchy, controllers, path = (*line.split(":", 2), "", "")[:3]
        if hierarchy == "0":
            roots = [cgroup]
        elif controller in controllers.split(","):
            # Version 1 mounts several controllers under a joint name. Only most systems also have a
            # link under each controller's name, so both names are tried.
            roots = [cgroup / controller, cgroup / controllers]
        else:
            continue
        for root in roots:
            own = root / path.lstrip("/")
            groups += [group for group in (own, *own.parents) if group.is_relative_to(root)]
    return list(dict.fromkeys(groups))


def read_text(path: Path) -> str:
    """A file's text, or empty text if the file cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _status(proc: Path, key: str) -> str:
    lines = read_text(proc / "self/status").splitlines()
    return next((line.partition(":")[2] for line in lines if line.startswith(f"{key}:")), "")


def _core(number: int, devices: Path) -> int:
    """The lowest processor on the same core, or `number` if the kernel lists no siblings."""
    topology = devices / f"cpu{number}" / "topology"
    siblings = cpu_list(
        read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
    )
    return min(siblings, default=number)


def _nodes(devices: Path) -> dict[int, int]:
    """The NUMA node of each processor. Empty if the kernel lists no nodes."""
    return {
        processor: int(directory.name.removeprefix("node"))
        for directory in devices.glob("node[0-9]*")
        for processor in cpu_list(read_text(directory / "cpulist"))
    }


def _quota(proc: Path, cgroup: Path) -> float | None:
    """The smallest processor-time limit of the process's control groups, in seconds per second, or
    None if no group has a limit.
    """
    limits = []
    for group in control_groups(proc, cgroup, "cpu"):
        limit, _, period = read_text(group / "cpu.max").strip().partition(" ")
        if not limit:
            limit = read_text(group / "cpu.cfs_quota_us").strip()
            period = read_text(group / "cpu.cfs_period_us").strip()
        if limit.isdigit() and period.isdigit() and int(period):
            limits.append(int(limit) / int(period))
    return min(limits, default=None)
