"""Simulates the loads of agents' programs, and computes the figures of the runs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from benchmarks.agents.loads import BASE, Load
from benchmarks.common.console import log
from benchmarks.common.tables import number_text, table_text
from services.simulation.laboratory.accounts import percentile
from services.simulation.laboratory.run import RunResult, Setup, simulate
from services.simulation.laboratory.workloads import generate


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run."""

    mean_seconds: float
    p99_seconds: float
    hit_rate: float
    recomputed: float
    """The fraction of computed tokens that had been computed before, and lost from the cache."""
    longest_wait_seconds: float
    context_tokens: float
    """The total context of all live programs, averaged over the time in which programs arrived."""


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
    """The figures of a load. `rows` maps a row's name to its figures, one for each seed."""

    load: Load
    rows: dict[str, list[Figures]]

    @property
    def pressure(self) -> float:
        contexts = fmean(one.context_tokens for one in self.rows["unlimited memory"])
        return contexts / self.load.kv_tokens

    def ratio(self, row: str) -> float:
        """Mean job time of fcfs divided by that of the row, as geometric mean over the seeds."""
        pairs = zip(self.rows[BASE], self.rows[row], strict=True)
        return math.exp(
            fmean(math.log(base.mean_seconds / one.mean_seconds) for base, one in pairs)
        )

    def mean(self, row: str, figure: str) -> float:
        return fmean(getattr(one, figure) for one in self.rows[row])


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
    """A table of the ratios, with a row for each rule that is left out."""
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
