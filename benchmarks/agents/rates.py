"""Finds the highest rates at which the mean job takes at most twice its time on an idle replica."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.agents.grid import geometric_mean
from benchmarks.agents.loads import BASE, Load, with_policy
from benchmarks.common.console import log
from benchmarks.common.tables import number_text, table_text
from services.scheduler.core.policies import PROGRAM
from services.simulation.laboratory.run import bounds, simulate
from services.simulation.laboratory.workloads import generate

LOADS = tuple(Load(name, 200_000, 0.0, 0.0, num_programs=400) for name in ("swe", "web", "mixed"))
UNLIMITED = "unlimited memory"
POLICIES = (BASE, "continuum-fixed", PROGRAM, UNLIMITED)
"""Scheduling policies, and fcfs with unlimited memory, a bound for all policies."""
SLOWDOWN = 2.0
BOUNDS = 0.1, 1.7
NUM_HALVINGS = 7


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest rate found for a load, a seed and a policy, in agents' programs a second."""

    load: str
    seed: int
    policy: str
    rate: float


def highest_rates(num_programs: int | None, seeds: Sequence[int]) -> Iterator[Highest]:
    for load in LOADS:
        sized = load if num_programs is None else replace(load, num_programs=num_programs)
        for seed in seeds:
            for policy in POLICIES:
                rate = highest_rate(sized, policy, seed)
                log(f"{load.name}, seed {seed}, {policy}: {rate:.2f} programs/s")
                yield Highest(load.name, seed, policy, rate)


def highest_rate(load: Load, policy: str, seed: int) -> float:
    """Finds the rate by bisection of the interval BOUNDS."""
    low, high = BOUNDS
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        is_low = slowdown(replace(load, rate=middle), policy, seed) <= SLOWDOWN
        low, high = (middle, high) if is_low else (low, middle)
    return low


def slowdown(load: Load, policy: str, seed: int) -> float:
    """The mean job time, divided by the mean job time on an idle replica."""
    programs = generate(load.name, load.traffic(seed))
    setup = load.setup()
    setup = bounds(setup)[policy] if policy == UNLIMITED else with_policy(setup, policy)
    accounts = simulate(setup, programs).accounts
    return fmean(accounts.job_seconds) / fmean(accounts.alone_seconds)


def rate_table(found: Sequence[Highest]) -> str:
    """The rates, as geometric means over the seeds, and their ratios to the rate of fcfs."""
    rows = []
    for load in dict.fromkeys(one.load for one in found):
        rates = [
            geometric_mean([one.rate for one in found if (one.load, one.policy) == (load, policy)])
            for policy in POLICIES
        ]
        ratios = (number_text(rate / rates[0], 2) for rate in rates[1:])
        rows.append((load, *(number_text(rate, 2) for rate in rates), *ratios))
    return table_text(("load", *POLICIES, *(f"{one}, ratio" for one in POLICIES[1:])), rows)
