"""The measures of a run, in five groups. Each group has its own table and plot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from services.simulation.laboratory.accounts import percentile
from services.simulation.laboratory.run import RunResult


@dataclass(frozen=True, slots=True)
class Measure:
    key: str
    """The measure's name in JSON, with the unit."""
    name: str
    of: Callable[[RunResult], float]
    is_percent: bool = False
    """Whether the value is a fraction, shown in percent."""

    def show(self, value: float) -> str:
        if self.is_percent:
            return f"{100 * value:.1f} %"
        return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _slowdowns(run: RunResult) -> list[float]:
    accounts = run.accounts
    pairs = zip(accounts.job_seconds, accounts.alone_seconds, strict=True)
    return [taken / alone for taken, alone in pairs if alone]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _waste(run: RunResult) -> int:
    accounts = run.accounts
    return accounts.num_evicted_tokens + accounts.num_preempted_tokens + accounts.num_cold_tokens


GROUPS: dict[str, tuple[Measure, ...]] = {
    "job time": (
        Measure("job_seconds_mean", "mean s", lambda r: _mean(r.accounts.job_seconds)),
        Measure("job_seconds_p50", "p50 s", lambda r: percentile(r.accounts.job_seconds, 0.5)),
        Measure("job_seconds_p99", "p99 s", lambda r: percentile(r.accounts.job_seconds, 0.99)),
        Measure("slowdown_mean", "slowdown mean", lambda r: _mean(_slowdowns(r))),
        Measure("slowdown_p99", "slowdown p99", lambda r: percentile(_slowdowns(r), 0.99)),
    ),
    "time to first token": tuple(
        Measure(
            f"{key}_turn_seconds_p{percent}",
            f"{key} turn p{percent} s",
            lambda r, key=key, percent=percent: percentile(  # type: ignore[misc]
                getattr(r.accounts, f"{key}_turn_seconds"), percent / 100
            ),
        )
        for key in ("first", "later")
        for percent in (50, 90, 99)
    ),
    "waste": (
        Measure("wasted", "of computed", lambda r: _share(_waste(r), r.num_computed_tokens), True),
        Measure(
            "wasted_evicted",
            "evicted",
            lambda r: _share(r.accounts.num_evicted_tokens, r.num_computed_tokens),
            True,
        ),
        Measure(
            "wasted_preempted",
            "preempted",
            lambda r: _share(r.accounts.num_preempted_tokens, r.num_computed_tokens),
            True,
        ),
        Measure(
            "wasted_cold",
            "cold replica",
            lambda r: _share(r.accounts.num_cold_tokens, r.num_computed_tokens),
            True,
        ),
        Measure("num_preemptions", "preemptions", lambda r: r.num_preemptions),
    ),
    "hit rate": (
        Measure(
            "hit_rate",
            "of prompts",
            lambda r: _share(r.accounts.num_cached_tokens, r.accounts.num_prompt_tokens),
            True,
        ),
        Measure(
            "reusable_rate",
            "with unlimited cache",
            lambda r: _share(r.accounts.num_reusable_tokens, r.accounts.num_prompt_tokens),
            True,
        ),
    ),
    "fairness": (
        Measure("fairness", "Jain's index of tenants", lambda r: r.accounts.fairness),
        Measure("worst_tenant", "worst tenant's speed", lambda r: r.accounts.worst_tenant_speed),
        Measure(
            "wait_seconds_p99", "wait p99 s", lambda r: percentile(r.accounts.wait_seconds, 0.99)
        ),
        Measure(
            "wait_seconds_max",
            "longest wait s",
            lambda r: max(r.accounts.wait_seconds, default=0.0),
        ),
    ),
}
