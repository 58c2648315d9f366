"""The machine that a benchmark ran on."""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

_BUSY_LOAD = 0.5


def machine() -> dict[str, str]:
    """The processor, the load and the versions of packages with which figures are measured."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "torch": version("torch"),
        "grpcio": version("grpcio"),
        "load_average": f"{os.getloadavg()[0]:.2f}",
    }


def machine_text(found: Mapping[str, str], command: str) -> str:
    """The command and the machine, with a warning if the machine was busy with other work."""
    text = (
        f"`{command}` on {found['processor']}, {found['cores']} cores; "
        f"Python {found['python']}, torch {found['torch']}, grpcio {found['grpcio']}."
    )
    if float(found["load_average"]) > _BUSY_LOAD:
        text += (
            f"\n\n**Not to be quoted: the machine was busy with other work when this began "
            f"(load average {found['load_average']}).**"
        )
    return text


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
