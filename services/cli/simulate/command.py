"""`stepwell simulate`: parses the arguments, runs the simulations and writes the results."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.cli.errors import CommandError, CommandParser, require_directory
from services.cli.plotting import require_matplotlib
from services.cli.simulate.report import document, draw, tables
from services.cli.simulate.step_log import read_step_log
from services.common.errors import InvalidArgument
from services.common.process.settings import SettingError
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies import POLICIES
from services.scheduler.core.step_log.log_entry import SCHEMA
from services.simulation.laboratory.policy_check import PolicyProblem, check_policy
from services.simulation.laboratory.programs import Program
from services.simulation.laboratory.run import RunResult, Setup, bounds, simulate
from services.simulation.laboratory.tier import NO_TIER, TierSize
from services.simulation.laboratory.traces import read_trace
from services.simulation.laboratory.workloads import NAMES, Traffic, generate
from services.worker.profiles.profile import MeasuredProfile, profile_names, read_profile

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


@dataclass(frozen=True, slots=True)
class Workload:
    programs: Callable[[], Iterator[Program]]
    num_programs: int


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.check_policy is not None:
        return _check(arguments)
    if arguments.plot is not None:
        require_matplotlib()
        _make_directory(arguments.plot)
    require_directory(arguments.json)
    try:
        setups = _setups(arguments)
        programs = _programs(arguments)
        runs = {name: _run(name, setup, programs) for name, setup in setups.items()}
    except (InvalidArgument, SettingError) as error:
        raise CommandError(str(error), exit_status=2) from None
    print(tables(runs))
    settings = _settings(arguments)
    if arguments.json is not None:
        _write(arguments.json, document(runs, settings))
    if arguments.plot is not None:
        title = "   ".join(
            f"{name} {value}" for name, value in settings.items() if value is not None
        )
        draw(runs, title, arguments.plot)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    name, number = arguments.check_policy, arguments.programs
    try:
        check_policy(name, number, arguments.seed)
    except InvalidArgument as error:
        raise CommandError(error.message, exit_status=2) from None
    except PolicyProblem as problem:
        raise CommandError(f"{name}: {problem}") from None
    print(f"{name}: {number} worlds, no problem")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "simulate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--workload",
        default="automated",
        metavar="NAME|FILE",
        help=f"{', '.join(NAMES)}, a trace in Mooncake's or Dynamo's format, or a step log "
        "(default: automated)",
    )
    add("--programs", type=_count, default=100, metavar="N", help="default: 100")
    add("--rate", type=_positive, default=0.1, metavar="X", help="programs a second (default: 0.1)")
    add("--scale", type=_positive, default=1.0, metavar="X", help="factor on numbers of tokens")
    add("--seed", type=int, default=0, metavar="N", help="seed of all random numbers (default: 0)")
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
        help="routing policy of the gateway; may be given several times",
    )
    add(
        "--profile",
        default="h100-8b",
        help=f"of the device: a measured profile's file or name, of {', '.join(profile_names())}",
    )
    add(
        "--kv-tokens", type=_count, default=458_000, metavar="N", help="in a pool (default: 458000)"
    )
    add(
        "--tier-tokens",
        type=_count,
        metavar="N",
        help="in the workers' tier of a replica (default: no tier)",
    )
    add("--block-size", type=_count, default=16, metavar="N", help="default: 16")
    add("--max-num-seqs", type=_count, default=256, metavar="N", help="default: 256")
    add("--max-num-batched-tokens", type=_count, default=8192, metavar="N", help="default: 8192")
    add(
        "--check-policy",
        metavar="NAME",
        help="run the checks for policies' authors in --programs small worlds, and nothing else",
    )
    add("--no-optimum", action="store_true", help="leave the offline optimum out")
    add(
        "--bounds",
        action="store_true",
        help="add unlimited memory (fcfs), and known work (program)",
    )
    add("--json", type=Path, metavar="FILE", help="write all measures")
    add("--plot", type=Path, metavar="DIRECTORY", help="write a plot of each group of measures")
    return parser


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("workload", "programs", "rate", "scale", "seed", "replicas", "profile", "kv_tokens")
    return {name: getattr(arguments, name) for name in names}


def _setups(arguments: argparse.Namespace) -> dict[str, Setup]:
    """The runs of the comparison: each policy with each routing and, for the first of these, the
    bounds and the optimum, a run that evicts cached blocks with knowledge of later requests.
    """
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
    base = Setup(
        config,
        profile.times,
        profile.serving,
        arguments.replicas,
        seed=arguments.seed,
        tier=_tier(arguments, profile),
    )
    setups = {}
    for routing in routings:
        for policy in policies:
            name = policy if len(routings) == 1 else f"{policy}, {routing}"
            setups[name] = replace(base, config=replace(config, policy=policy), routing=routing)
    first = next(iter(setups.values()))
    if arguments.bounds:
        setups |= bounds(first)
    if not arguments.no_optimum:
        setups["optimum (offline)"] = replace(first, is_optimum=True)
    return setups


def _tier(arguments: argparse.Namespace, profile: MeasuredProfile) -> TierSize:
    if arguments.tier_tokens is None:
        return NO_TIER
    if not profile.seconds_per_loaded_token:
        raise CommandError(
            f"--tier-tokens: the profile {arguments.profile} has no seconds_per_loaded_token"
        )
    size = arguments.block_size
    return TierSize(-(-arguments.tier_tokens // size), size * profile.seconds_per_loaded_token)


def _programs(arguments: argparse.Namespace) -> Workload:
    name, num_programs = arguments.workload, arguments.programs
    if name not in NAMES:
        listed = _read(Path(name))[:num_programs]
        if not listed:
            raise CommandError(f"--workload {name}: there is no request")
        return Workload(lambda: iter(listed), len(listed))
    longest = arguments.kv_tokens // 2
    traffic = Traffic(arguments.programs, arguments.rate, arguments.seed, arguments.scale, longest)
    return Workload(lambda: generate(name, traffic), num_programs)


def _read(path: Path) -> list[Program]:
    """Reads a workload from a file: a step log if the file has a step log's schema or is
    compressed, otherwise a trace.
    """
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 16)
        if path.suffix == ".zst" or SCHEMA.encode() in first:
            return read_step_log(path)
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise CommandError(f"--workload {path}: {why}; generated are {', '.join(NAMES)}") from None


def _run(name: str, setup: Setup, workload: Workload) -> RunResult:
    progress = Progress(name, workload.num_programs)
    run = simulate(setup, workload.programs(), progress.ended)
    progress.done(run)
    return run


class Progress:
    """Shows how many programs of a run have ended, on a terminal more often than in a file."""

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


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--plot {path}: {error.strerror}", exit_status=2) from None


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
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, and finite, not {text}")
    return number
