"""Compares policies of scheduling on agents' programs, by job time.

    python -m benchmarks.agents --simulated [--quick] [--ladder] [--seeds N] [--load NAME]...
                                [--json FILE]

Each load has a pool and a rate. Its pressure is the mean sum of contexts of live programs, while
programs arrive, with unlimited memory, divided by the pool. A ratio is the mean job time with fcfs
divided by the mean job time of a row, as geometric mean over the seeds. The ladder leaves out each
rule of the policy `program` in turn.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.agents.ladder import RULES
from benchmarks.common.arguments import count, make_parser
from benchmarks.common.console import log, show
from benchmarks.common.tables import number_text, table_text
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies import POLICIES, PROGRAM, holds_ended
from services.simulation.laboratory.accounts import percentile
from services.simulation.laboratory.run import RunResult, Setup, bounds, simulate
from services.simulation.laboratory.tier import NO_TIER, TierSize
from services.simulation.laboratory.workloads import Traffic, generate
from services.worker.profiles.profile import MeasuredProfile, read_profile

BASE = "fcfs"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    kv_tokens: int
    rate: float
    required: float
    """The ratio that the policy `program` should reach."""
    scale: float = 1.0
    num_programs: int = 200
    profile: str = "h100-8b"
    max_num_seqs: int = 256
    token_budget: int = 8192
    tier_tokens: int = 0
    """The size of the workers' tier, which all rows have but fcfs."""

    @property
    def text(self) -> str:
        scale = "" if self.scale == 1.0 else f", tokens x {self.scale:g}"
        return f"{self.name}{scale}{', tier' if self.tier_tokens else ''}"

    def setup(self) -> Setup:
        profile = read_profile(self.profile)
        assert isinstance(profile, MeasuredProfile)
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.token_budget,
            max_model_len=self.kv_tokens,
            block_size=BLOCK_SIZE,
            num_blocks=1 + self.kv_tokens // BLOCK_SIZE,
            async_scheduling=True,
        )
        size = self.tier_tokens // BLOCK_SIZE
        tier = TierSize(size, BLOCK_SIZE * profile.seconds_per_loaded_token)
        return Setup(config, profile.times, profile.serving, tier=tier)

    def traffic(self, seed: int) -> Traffic:
        """The longest context leaves space in the pool for others."""
        longest = round(self.kv_tokens / 1.15)
        return Traffic(self.num_programs, self.rate, seed, self.scale, longest)


_CPU = Load(
    "swe",
    8_000,
    0.3,
    required=10.0,
    scale=0.2,
    num_programs=150,
    profile="135m-epyc-2-cores",
    max_num_seqs=64,
    token_budget=512,
)
LOADS = (
    Load("swe", 200_000, 0.8, required=3.7),
    Load("swe", 200_000, 1.0, required=4.0),
    Load("swe-50", 200_000, 0.8, required=7.5),
    Load("web", 200_000, 0.8, required=2.6),
    Load("smith", 420_000, 0.9, required=8.5),
    Load("mixed", 200_000, 0.6, required=1.7),
    Load("mixed", 54_000, 0.27, required=2.0),
    Load("swe", 100_000, 0.8, required=4.2, tier_tokens=200_000),
    replace(_CPU, rate=0.12),
    _CPU,
)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run."""

    mean_seconds: float
    p99_seconds: float
    hit_rate: float
    recomputed: float
    """The fraction of the computed tokens that was computed before."""
    longest_wait_seconds: float
    context_tokens: float
    """The mean sum of contexts of live programs while programs arrived."""


def figures(run: RunResult) -> Figures:
    accounts = run.accounts
    recomputed = accounts.num_evicted_tokens + accounts.num_preempted_tokens
    return Figures(
        fmean(accounts.job_seconds),
        percentile(accounts.job_seconds, 0.99),
        accounts.num_cached_tokens / accounts.num_prompt_tokens,
        recomputed / run.num_computed_tokens,
        max(accounts.wait_seconds),
        accounts.mean_context_tokens,
    )


@dataclass(slots=True)
class Comparison:
    """The figures of a load, by row and seed."""

    load: Load
    rows: dict[str, list[Figures]]

    @property
    def pressure(self) -> float:
        contexts = fmean(one.context_tokens for one in self.rows["unlimited memory"])
        return contexts / self.load.kv_tokens

    def ratio(self, row: str) -> float:
        """How many times as long the mean job takes with fcfs, as geometric mean over the seeds."""
        pairs = zip(self.rows[BASE], self.rows[row], strict=True)
        return math.exp(
            fmean(math.log(base.mean_seconds / one.mean_seconds) for base, one in pairs)
        )

    def mean(self, row: str, figure: str) -> float:
        return fmean(getattr(one, figure) for one in self.rows[row])


def policy_setups(load: Load) -> dict[str, Setup]:
    base = load.setup()
    names = [name for name in POLICIES if name != "priority"]  # programs have no priorities
    rows = {name: with_policy(base, name) for name in names} | bounds(base)
    if load.tier_tokens:
        rows = {name: setup for name, setup in rows.items() if not holds_ended(setup.config.policy)}
        rows |= {BASE: replace(rows[BASE], tier=NO_TIER), f"{BASE}, tier": rows[BASE]}
    return rows


def ladder_setups(load: Load) -> dict[str, Setup]:
    base = load.setup()
    rules = {
        rule: with_policy(base, f"{kind.__module__}:{kind.__name__}")
        for rule, kind in RULES.items()
    }
    return {name: with_policy(base, name) for name in (BASE, PROGRAM)} | rules


def with_policy(setup: Setup, policy: str) -> Setup:
    return replace(setup, config=replace(setup.config, policy=policy))


def compare(load: Load, seeds: Iterable[int], setups: Mapping[str, Setup]) -> Comparison:
    rows: dict[str, list[Figures]] = {name: [] for name in setups}
    for seed in seeds:
        for name, setup in setups.items():
            programs = generate(load.name, load.traffic(seed))
            found = figures(simulate(setup, programs))
            rows[name].append(found)
            log(f"{load.text} at {load.rate:g}, seed {seed}, {name}: {found.mean_seconds:.1f} s")
    return Comparison(load, rows)


def ratio_table(comparisons: Sequence[Comparison]) -> str:
    others = list(dict.fromkeys(name for one in comparisons for name in one.rows if name != BASE))
    header = ("load", "pool, tokens", "programs/s", "pressure", f"{BASE}, s", *others, "required")
    return table_text(header, (_ratios(one, others) for one in comparisons))


def _ratios(one: Comparison, rows: Sequence[str]) -> list[str]:
    load = one.load
    return [
        load.text,
        f"{load.kv_tokens:,}",
        f"{load.rate:g}",
        number_text(one.pressure, 1),
        number_text(one.mean(BASE, "mean_seconds"), 0),
        *(number_text(one.ratio(name), 2) if name in one.rows else "" for name in rows),
        number_text(load.required, 1),
    ]


def ladder_table(comparisons: Sequence[Comparison]) -> str:
    """The ratios, with a row for each rule."""
    header = ("row", *(f"{one.load.text}, {one.load.rate:g}" for one in comparisons))
    rows = [name for name in comparisons[0].rows if name != BASE]
    ratios = ((row, *(number_text(one.ratio(row), 2) for one in comparisons)) for row in rows)
    return table_text(header, ratios)


def detail_table(comparisons: Sequence[Comparison]) -> str:
    header = ("load, programs/s", "row", "mean s", "p99 s", "hits", "recomputed", "longest wait s")
    return table_text(header, (cells for one in comparisons for cells in _details(one)))


def _details(one: Comparison) -> Iterator[list[str]]:
    for row in one.rows:
        yield [
            f"{one.load.text}, {one.load.rate:g}",
            row,
            number_text(one.mean(row, "mean_seconds"), 1),
            number_text(one.mean(row, "p99_seconds"), 0),
            number_text(one.mean(row, "hit_rate"), 3),
            number_text(one.mean(row, "recomputed"), 3),
            number_text(one.mean(row, "longest_wait_seconds"), 0),
        ]


def document(comparisons: Sequence[Comparison]) -> list[Mapping[str, object]]:
    return [
        {
            "load": asdict(one.load),
            "rows": {name: [asdict(run) for run in runs] for name, runs in one.rows.items()},
        }
        for one in comparisons
    ]


def main(argv: Sequence[str]) -> None:
    arguments = parse_options(argv)
    loads = [load for load in LOADS if load.name in arguments.load]
    num_seeds = arguments.seeds
    if arguments.quick:
        loads, num_seeds = [replace(load, num_programs=20) for load in loads], 1
    setups_of = ladder_setups if arguments.ladder else policy_setups
    comparisons = [compare(load, range(num_seeds), setups_of(load)) for load in loads]
    text = f"Seeds 0 to {num_seeds - 1}, {' or '.join(_numbers(loads))} programs."
    table = ladder_table if arguments.ladder else ratio_table
    show(f"`python -m benchmarks.agents {' '.join(argv)}`. {text}", table(comparisons))
    show(detail_table(comparisons))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document(comparisons), indent=1) + "\n")


def _numbers(loads: Iterable[Load]) -> list[str]:
    return sorted({str(load.num_programs) for load in loads})


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("agents", (__doc__ or "").partition("\n")[0])
    names = sorted({load.name for load in LOADS})
    add = parser.add_argument
    add("--simulated", action="store_true", required=True, help="on simulated time")
    add("--quick", action="store_true", help="20 programs of each load, and one seed")
    add("--ladder", action="store_true", help="leave out each rule of the policy program in turn")
    add("--seeds", type=count, default=4, help="number of seeds (default: 4)")
    add("--load", action="append", choices=names, help="default: all; may be given several times")
    add("--json", type=Path, help="write the figures")
    arguments = parser.parse_args(argv)
    arguments.load = arguments.load or names
    return arguments


if __name__ == "__main__":
    main(sys.argv[1:])
