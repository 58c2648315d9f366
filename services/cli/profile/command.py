"""`stepwell profile`: parses the arguments, and writes the profile and a report."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.errors import CommandError, CommandParser, require_directory
from services.common.errors import StepwellError
from services.common.process.settings import SettingError, parse_settings

if TYPE_CHECKING:
    from services.cli.profile.fit import Errors, Fit
    from services.worker.core.worker import WorkerDescription

_LEAST_STEPS = 100


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        "profile",
        description="Loads a model as a worker does, measures steps of random shapes, and fits the "
        "times of a profile for --device simulated. Prints the profile and its errors for steps "
        "that were not fitted.",
        epilog="Further settings of the worker are variables such as STEPWELL_WORKER_NUM_THREADS.",
    )
    parser.add_argument("--model", required=True, help="directory, GGUF file or name on the hub")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the profile to this TOML file"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=1000,
        metavar="N",
        help=f"steps to measure, at least {_LEAST_STEPS} (default: 1000)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="N",
        help="all steps are run three times, and up to 31 times within this time (default: 60)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the shapes")
    arguments = parser.parse_args(argv)
    if arguments.steps < _LEAST_STEPS:
        parser.error(f"--steps must be at least {_LEAST_STEPS}")
    require_directory(arguments.output)
    # Imported here, since importing torch takes seconds.
    from services.cli.profile.fit import fit_times  # noqa: PLC0415
    from services.cli.profile.steps import MeasuredWorker  # noqa: PLC0415
    from services.worker.build import load_worker  # noqa: PLC0415
    from services.worker.settings import WorkerSettings  # noqa: PLC0415

    try:
        settings = parse_settings(
            WorkerSettings, "worker", ["--model", arguments.model], os.environ
        )
        worker = load_worker(settings, lambda: None, None)
    except (SettingError, StepwellError) as error:
        raise CommandError(str(error)) from error
    if worker.description.pooler is not None:
        raise CommandError(
            "only models that generate text can be measured; this model returns vectors"
        )

    def progress(number: int, done: int) -> None:
        if sys.stderr.isatty():
            text = f"\rround {number}, {done} of {arguments.steps} steps "
            print(text, end="", file=sys.stderr, flush=True)

    measuring = MeasuredWorker(worker.runner, arguments.seed)
    fit = fit_times(measuring.measure(arguments.steps, arguments.seconds, progress))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    text = profile_text(fit, worker.description)
    if arguments.output is None:
        print(text, end="")
        return 0
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{arguments.output} cannot be written: {error.strerror}") from error
    print(f"decode: {_errors(fit.decode)}\nmixed:  {_errors(fit.mixed)}")
    return 0


def profile_text(fit: "Fit", described: "WorkerDescription") -> str:
    """Formats the profile for services/worker/profiles/profile.py."""
    memory = described.num_blocks * described.bytes_per_block
    name, computed_with = described.model_name, f"{described.dtype}, {described.kernels}"
    lines = [
        "# Measured by `stepwell profile`. Relative errors for steps that were not fitted:",
        f"# decode: {_errors(fit.decode)}",
        f"# mixed:  {_errors(fit.mixed)}",
        f"about = {json.dumps(f'{name}, {computed_with}, measured')}",
        f"kv_cache_memory_bytes = {memory:_}",
    ]
    for kind, costs in {"mixed": fit.times.mixed, "decode": fit.times.decode}.items():
        lines += ["", f"[{kind}]", *cost_lines(asdict(costs))]
    return "\n".join(lines) + "\n"


def cost_lines(costs: Mapping[str, Any]) -> Iterator[str]:
    """Formats the fields of StepCosts or ServingCosts for a profile, without those that are 0."""
    for name, value in costs.items():
        if isinstance(value, tuple):
            points = ", ".join(f"[{place}, {seconds:.4g}]" for place, seconds in value)
            yield f"{name} = [{points}]"
        elif value:
            yield f"{name} = {value:.4g}"


def _errors(errors: "Errors") -> str:
    return f"median {errors.median:.1%}, p90 {errors.p90:.1%} of {errors.num_steps} steps"
