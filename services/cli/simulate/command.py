"""The command line of `stepwell simulate`: arguments, progress and output."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.cli.errors import CommandError, CommandParser
from services.cli.plotting import require_matplotlib
from services.cli.simulate.report import document, draw, tables
from services.common.errors import InvalidArgument
from services.common.process.settings import SettingError
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies import POLICIES
from services.simulation.laboratory.programs import Program
from services.simulation.laboratory.run import RunResult, Setup, simulate
from services.simulation.laboratory.workloads import NAMES, Traffic, generate
from services.worker.options.simulated.profile import MeasuredProfile, profile_names, read_profile

DESCRIPTION = """\
Runs whole fleets on simulated time: the real schedulers, pools and routing, with a device whose
step times a profile gives. Compares policies of scheduling and routing on one workload.
"""
EPILOG = """\
The last row of each table is the offline optimum: the first policy, with a pool that knows when
each program sends its next request, and evicts what is used last. The same seed gives the same
output. docs/simulation.md leads from an idea to a plot.
"""
_STEADY_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.plot is not None:
        require_matplotlib()
    try:
        setups = _setups(arguments)
        runs = {name: _run(name, setup, arguments) for name, setup in setups.items()}
    except (InvalidArgument, SettingError) as error:
        raise CommandError(str(error), exit_status=2) from None
    print(tables(runs))
    settings = _settings(arguments)
    if arguments.json is not None:
        _write(arguments.json, document(runs, settings))
    if arguments.plot is not None:
        arguments.plot.mkdir(parents=True, exist_ok=True)
        title = "   ".join(
            f"{name} {value}" for name, value in settings.items() if value is not None
        )
        draw(runs, title, arguments.plot)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "simulate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workload", default="automated", choices=NAMES, help="default: automated")
    add("--programs", type=_count, default=100, metavar="N", help="default: 100")
    add("--rate", type=_positive, default=0.1, metavar="X", help="programs a second (default: 0.1)")
    add("--scale", type=_positive, default=1.0, metavar="X", help="factor on agents' tokens")
    add("--seed", type=int, default=0, metavar="N", help="fixes everything (default: 0)")
    add("--replicas", type=_count, default=1, metavar="N", help="default: 1")
    add(
        "--policy",
        action="append",
        metavar="NAME",
        help=f"{', '.join(POLICIES)} or package.module:Class; may be given several times",
    )
    add(
        "--routing",
        action="append",
        metavar="NAME",
        help="of the gateway; may be given several times",
    )
    add(
        "--profile",
        default="h100-8b",
        help=f"of the device: a measured profile's file or name, of {', '.join(profile_names())}",
    )
    add(
        "--kv-tokens", type=_count, default=458_000, metavar="N", help="in a pool (default: 458000)"
    )
    add("--block-size", type=_count, default=16, metavar="N", help="default: 16")
    add("--max-num-seqs", type=_count, default=256, metavar="N", help="default: 256")
    add("--max-num-batched-tokens", type=_count, default=8192, metavar="N", help="default: 8192")
    add("--no-optimum", action="store_true", help="leave the offline optimum out")
    add("--json", type=Path, metavar="FILE", help="write all measures")
    add("--plot", type=Path, metavar="DIRECTORY", help="write a plot of each group of measures")
    return parser


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("workload", "programs", "rate", "scale", "seed", "replicas", "profile", "kv_tokens")
    return {name: getattr(arguments, name) for name in names}


def _setups(arguments: argparse.Namespace) -> dict[str, Setup]:
    """The runs of the comparison: each policy with each routing, and the optimum."""
    profile = read_profile(arguments.profile)
    if not isinstance(profile, MeasuredProfile):
        raise CommandError(
            f"--profile {arguments.profile} has no step times of a model: measure one with "
            "`stepwell profile`"
        )
    config = SchedulerConfig(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.kv_tokens,
        block_size=arguments.block_size,
        num_blocks=1 + -(-arguments.kv_tokens // arguments.block_size),
        async_scheduling=True,
    )
    policies = arguments.policy or ["fcfs"]
    routings = arguments.routing or ["cache-aware"]
    base = Setup(config, profile.times, arguments.replicas, seed=arguments.seed)
    setups = {}
    for routing in routings:
        for policy in policies:
            name = policy if len(routings) == 1 else f"{policy}, {routing}"
            setups[name] = replace(base, config=replace(config, policy=policy), routing=routing)
    if not arguments.no_optimum:
        first = next(iter(setups.values()))
        setups["optimum (offline)"] = replace(first, is_optimum=True)
    return setups


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    longest = arguments.kv_tokens // 2
    traffic = Traffic(arguments.programs, arguments.rate, arguments.seed, arguments.scale, longest)
    return generate(arguments.workload, traffic)


def _run(name: str, setup: Setup, arguments: argparse.Namespace) -> RunResult:
    progress = Progress(name, arguments.programs)
    run = simulate(setup, _programs(arguments), progress.ended)
    progress.done(run)
    return run


class Progress:
    """Shows how many programs of a run have ended: on a terminal always, otherwise now and then."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._num_ended = 0
        self._is_terminal = sys.stderr.isatty()
        self._shown_at = time.monotonic()

    def ended(self) -> None:
        self._num_ended += 1
        seconds = 0.2 if self._is_terminal else _STEADY_SECONDS
        if time.monotonic() - self._shown_at >= seconds:
            self._shown_at = time.monotonic()
            self._show()

    def done(self, run: RunResult) -> None:
        microseconds = 1e6 * run.real_seconds / max(1, run.num_steps)
        self._show(
            f", {run.simulated_seconds:,.0f} s in {run.real_seconds:,.1f} s, "
            f"{run.num_steps:,} steps at {microseconds:,.0f} us\n"
        )

    def _show(self, more: str = "") -> None:
        share = 100 * self._num_ended // self._total
        line = f"{self._name}: {share} %, {self._num_ended:,} programs{more}"
        end = "" if more or self._is_terminal else "\n"
        print(f"\r{line}" if self._is_terminal else line, end=end, file=sys.stderr, flush=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number
