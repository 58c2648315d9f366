"""The whole examination, in the process that computes."""

from collections.abc import Callable
from pathlib import Path

import torch

from services.cli.doctor.kernels import choose_kernels
from services.cli.doctor.limits import measure_limits
from services.cli.doctor.machine import hardware, software
from services.cli.doctor.report import Report
from services.cli.doctor.run import run_model
from services.common.process.processors import usable_processors
from services.worker.platforms.threads import choose_threads


def examine(model: Path, name: str, progress: Callable[[str], None]) -> Report:
    """Computes with as many threads as a worker alone on this machine. Raises the errors of a
    worker's start.
    """
    processors = usable_processors()
    threads = choose_threads(processors)
    torch.set_num_threads(threads.num_threads)
    report = {"software": software(), "machine": hardware(processors, threads)}
    progress("selecting kernels")
    kernels, report["kernels"] = choose_kernels(progress)
    progress("measuring arithmetic and memory")
    limits = measure_limits(kernels)
    report["limits"] = limits.facts()
    progress(f"running {name}")
    report["run"] = run_model(model, name, limits)
    return report
