"""Recorded machines: directories with the files of /proc and /sys that describe processors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine with equal sockets, and one or two processors on each core. As on Linux, the
    numbers of the cores' second processors follow the numbers of all first processors. With
    `are_adjacent`, the processors of a core have successive numbers, as on some virtual machines.

    `online` and `allowed`, the affinity mask, are lists of processors in the format of Linux.
    `cgroup` has the lines of /proc/self/cgroup. `limits` maps names of files in /sys/fs/cgroup to
    their text.
    """

    num_cores: int
    num_threads: int = 1
    num_nodes: int = 1
    are_adjacent: bool = False
    online: str = ""
    allowed: str = ""
    cgroup: str = "0::/"
    limits: Mapping[str, str] = field(default_factory=dict)

    def record(self, root: Path) -> Path:
        """Writes the files into `root`. Returns `root`."""
        for path, text in {**self._files(), **self._groups()}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(f"{text}\n")
        return root

    def processors(self, core: int) -> list[int]:
        """The numbers of the processors on a core."""
        if self.are_adjacent:
            return [core * self.num_threads + thread for thread in range(self.num_threads)]
        return [core + thread * self.num_cores for thread in range(self.num_threads)]

    def _files(self) -> dict[str, str]:
        last = self.num_cores * self.num_threads - 1
        files = {
            "proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{self.allowed or f'0-{last}'}",
            "sys/devices/system/cpu/online": self.online or f"0-{last}",
        }
        nodes: dict[int, list[int]] = {}
        for core in range(self.num_cores):
            own = self.processors(core)
            nodes.setdefault(core * self.num_nodes // self.num_cores, []).extend(own)
            for number in own:
                path = f"sys/devices/system/cpu/cpu{number}/topology/core_cpus_list"
                files[path] = ",".join(map(str, own))
        for node, numbers in nodes.items():
            path = f"sys/devices/system/node/node{node}/cpulist"
            files[path] = ",".join(map(str, sorted(numbers)))
        return files

    def _groups(self) -> dict[str, str]:
        files = {f"sys/fs/cgroup/{path}": text for path, text in self.limits.items()}
        return {"proc/self/cgroup": self.cgroup, **files}
