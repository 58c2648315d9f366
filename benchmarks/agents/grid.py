"""Compares the scheduling policies over a grid of loads and pressures.

The capacity is the number of agents' programs (sequences of requests) that a replica with unlimited
memory completes in a second if all programs arrive at once. The load is the rate of arrivals
divided by the capacity. The pool's size is the total context of all live programs divided by the
pressure, but at least 1.15 times the longest context. The total context is averaged over a run with
unlimited memory.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.agents.loads import BASE, BLOCK_SIZE, Load, with_policy
from benchmarks.agents.runs import Figures, figures
from benchmarks.common.console import log
from benchmarks.common.tables import number_text, table_text
from services.scheduler.core.policies import PROGRAM
from services.simulation.laboratory.programs import Program
from services.simulation.laboratory.run import RunResult, simulate
from services.simulation.laboratory.workloads import generate

NAMES = ("swe", "web", "smith", "mixed", "coding")
SHARES = (0.3, 0.6)
"""Rates of arrivals, as fractions of the capacity."""
PRESSURES = (0.5, 1.0, 1.5, 2.5, 4.0)
FIXED = "continuum-fixed"
POLICIES = (BASE, FIXED, PROGRAM)
_UNLIMITED_TOKENS = 20_000_000
_LONGEST = 100_000
_AT_ONCE = 1e3
"""A rate, in programs a second, at which practically all programs arrive at once."""


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    load: float
    wanted_pressure: float
    pressure: float
    """The real pressure. It is lower than `wanted_pressure` if the pool has its minimum size."""
    seed: int
    runs: dict[str, Figures]

    @property
    def text(self) -> str:
        return f"{self.name} at {self.load:g}, pressure {self.pressure:.2f}, seed {self.seed}"

    def ratio(self, row: str, base: str, figure: str) -> float:
        """The `figure` of the policy `base` divided by the `figure` of the policy `row`."""
        return float(getattr(self.runs[base], figure) / getattr(self.runs[row], figure))


def settings(num_programs: int, seeds: Sequence[int], turns: int | None) -> Iterator[Setting]:
    """Runs all settings. If `turns` is given, each program is cut after that number of turns."""
    for name in NAMES:
        for seed in seeds:
            unlimited = Load(name, _UNLIMITED_TOKENS, _AT_ONCE, 0.0, num_programs=num_programs)
            batch = _run(unlimited, BASE, seed, turns)
            capacity = num_programs / batch.simulated_seconds
            for load in SHARES:
                at_load = replace(unlimited, rate=load * capacity)
                contexts = _run(at_load, BASE, seed, turns).accounts.mean_context_tokens
                least = round(1.15 * max(map(_context, _programs(at_load, seed, turns))))
                runs: dict[int, dict[str, Figures]] = {}
                for pressure in PRESSURES:
                    size = max(least, round(contexts / pressure)) // BLOCK_SIZE * BLOCK_SIZE
                    if size not in runs:
                        setting = replace(at_load, kv_tokens=size)
                        runs[size] = {
                            one: figures(_run(setting, one, seed, turns)) for one in POLICIES
                        }
                    found = Setting(name, load, pressure, contexts / size, seed, runs[size])
                    log(f"{found.text}: {found.ratio(PROGRAM, BASE, 'mean_seconds'):.2f}")
                    yield found


def _run(load: Load, policy: str, seed: int, turns: int | None) -> RunResult:
    return simulate(with_policy(load.setup(), policy), _programs(load, seed, turns))


def _programs(load: Load, seed: int, turns: int | None) -> Iterator[Program]:
    traffic = replace(load.traffic(seed), max_tokens=_LONGEST)
    for program in generate(load.name, traffic):
        yield replace(program, turns=program.turns[:turns])


def _context(program: Program) -> int:
    """The largest number of tokens of a request of the program, including its answer."""
    context = longest = program.num_shared_tokens
    for turn in program.turns:
        if turn.num_kept_tokens is not None:
            context = max(turn.num_kept_tokens, program.num_shared_tokens)
        context += turn.num_new_tokens + turn.num_output_tokens
        longest = max(longest, context)
    return longest


def grid_table(found: Sequence[Setting]) -> str:
    """A table of the ratios of fcfs and continuum-fixed to `program` by mean job time, as geometric
    means over the seeds. The mean pressure follows each ratio in parentheses.
    """
    header = ("load", "of capacity", *(f"pressure {one:g}" for one in PRESSURES))
    rows = []
    for name in NAMES:
        for load in SHARES:
            cells = [name, number_text(load, 1)]
            for pressure in PRESSURES:
                key = name, load, pressure
                of = [one for one in found if (one.name, one.load, one.wanted_pressure) == key]
                fcfs, fixed = (
                    geometric_mean([one.ratio(PROGRAM, base, "mean_seconds") for one in of])
                    for base in (BASE, FIXED)
                )
                cells.append(f"{fcfs:.2f} / {fixed:.2f} ({fmean(one.pressure for one in of):.1f})")
            rows.append(cells)
    return table_text(header, rows)


def summary_table(found: Sequence[Setting]) -> str:
    header = ("program against", "figure", "geometric mean", "worst", "of settings below 0.98")
    rows = []
    for base in BASE, FIXED:
        for figure, text in (("mean_seconds", "mean"), ("p99_seconds", "p99")):
            ratios = [one.ratio(PROGRAM, base, figure) for one in found]
            below = sum(ratio < 0.98 for ratio in ratios)
            cells = number_text(geometric_mean(ratios), 2), number_text(min(ratios), 3)
            rows.append((base, text, *cells, f"{below} of {len(ratios)}"))
    return table_text(header, rows)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, ratios)))
