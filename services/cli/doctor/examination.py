"""The whole examination, in the process that computes."""

from collections.abc import Callable
from pathlib import Path

from services.cli.doctor.kernels import choose_kernels
from services.cli.doctor.limits import measure_limits
from services.cli.doctor.machine import hardware, software
from services.cli.doctor.report import Report
from services.cli.doctor.run import run_model
from services.common.process.processors import usable_processors
from services.worker.platforms.placement import bind_and_set, place_threads


def examine(model: Path, name: str, progress: Callable[[str], None]) -> Report:
    """Computes with the threads of a worker alone on this machine. Raises the errors of a
    worker's start.
    """
    processors = usable_processors()
    threads = place_threads(processors)
    bind_and_set(threads)
    report = {"software": software(), "machine": hardware(processors, threads)}
    progress("selecting kernels")
    kernels, report["kernels"] = choose_kernels(progress)
    progress("measuring arithmetic and memory")
    limits = measure_limits(kernels)
    report["limits"] = limits.facts()
    progress(f"running {name}")
    report["run"] = run_model(model, name, limits)
    return report
