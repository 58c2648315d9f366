"""Describes the machine: software, processor, cores, quota, memory and GPUs."""

import os
import platform
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from services.cli.doctor.report import Fact
from services.common.process.processors import Processors, read_text
from services.worker.backends.device import UnsuitableDevice
from services.worker.backends.native.compiled import processor_features
from services.worker.platforms.cuda_setup import check_setup, find_setup
from services.worker.platforms.machine import available_memory_bytes
from services.worker.platforms.threads import ThreadChoice

_GIB = 2**30
_FEATURES = ("amx", "avx", "asimd", "bf16", "f16c", "fma", "i8mm", "sve")
"""Prefixes of the processor features that matter to kernels."""
_ARM_PARTS = {
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
}
"""Names of ARM's cores by implementer and part, from Linux's asm/cputype.h."""
_ARM_IMPLEMENTERS = {"0x41": "ARM", "0x61": "Apple"}


def software() -> list[Fact]:
    found = {
        "stepwell": _version("stepwell"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "linux": platform.release(),
        "compiler": _compiler(),
    }
    return [Fact(name, value, value or "none") for name, value in found.items()]


def hardware(processors: Processors, threads: ThreadChoice) -> list[Fact]:
    """Facts about the hardware. `threads` are the threads of a worker on `processors`."""
    nodes = Counter(processor.node for processor in processors.allowed)
    quota = processors.quota
    features = sorted(each for each in processor_features() if each.startswith(_FEATURES))
    memory = _meminfo("MemTotal") * 1024
    available = available_memory_bytes()
    load = os.getloadavg()[0]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [
        Fact("processor", processor_name(), f"{processor_name()} ({platform.machine()})"),
        Fact("features", features, " ".join(features) or "unknown"),
        Fact("processors", processors.num_allowed, f"{processors.num_allowed} usable"),
        Fact("cores", processors.num_cores, str(processors.num_cores)),
        Fact("quota", quota, "none" if quota is None else f"{quota:g} processors (cgroup)"),
        Fact(
            "numa_nodes",
            {str(node): count for node, count in sorted(nodes.items())},
            ", ".join(f"node {node}: {count} processors" for node, count in sorted(nodes.items())),
        ),
        Fact("threads", threads.num_threads, str(threads)),
        Fact("load_average", round(load, 2), f"{load:.2f}{_busy(load)}"),
        Fact(
            "memory",
            {"total_bytes": memory, "available_bytes": available},
            f"{memory / _GIB:.1f} GiB, {available / _GIB:.1f} GiB available to this process",
        ),
        *_huge_pages(),
        Fact("gpus", gpus, ", ".join(gpus) or "none"),
        *([_gpu_suitability()] if gpus else []),
    ]


def _busy(load: float) -> str:
    return ": other programs are running, so the figures below are too low" if load > 0.5 else ""


def _gpu_suitability() -> Fact:
    try:
        check_setup(find_setup())
    except UnsuitableDevice as error:
        return Fact("cuda", {"refusal": error.message}, error.message)
    return Fact("cuda", {"refusal": None}, "a worker computes on the GPU")


def _huge_pages() -> list[Fact]:
    modes = read_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")).split()
    mode = next((each.strip("[]") for each in modes if each.startswith("[")), None)
    reserved = _meminfo("HugePages_Total")
    return [Fact("huge_pages", mode, f"transparent: {mode or 'unknown'}, {reserved} reserved")]


def _meminfo(key: str) -> int:
    for line in read_text(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    return 0


def processor_name(information: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the first processor. On ARM, Linux reports numbers instead of a name."""
    found: dict[str, str] = {}
    for line in read_text(information).splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    if "model name" in found:
        return found["model name"]
    implementer, part = found.get("CPU implementer", ""), found.get("CPU part", "")
    if not implementer:
        return "unknown"
    name = _ARM_PARTS.get((implementer, part)) or _ARM_IMPLEMENTERS.get(implementer, "unknown")
    return f"{name}, implementer {implementer}, part {part}"


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _compiler() -> str | None:
    command = shutil.which(os.environ.get("CXX", "c++"))
    if command is None:
        return None
    ran = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return next(iter(ran.stdout.splitlines()), None)
