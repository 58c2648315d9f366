"""Examines this machine: software, hardware, kernels, limits, and a short run of a model."""

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
    """Returns the report. Computes with the threads of a worker that runs alone on this machine.
    Raises the errors that a worker raises at its start.
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
