"""Formats a table that compares two runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.cli.replay.statistics import RunStatistics, middle, percentile
from services.scheduler.core.output import WaitReason

Measure = Callable[[RunStatistics], float | None]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: the name and the function of a metric, and whether it is in percent."""

    name: str
    measure: Measure
    percent: bool = False

    def show(self, value: float | None) -> str:
        if value is None:
            return "-"
        if self.percent:
            return f"{100 * value:.1f} %"
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"

    def show_change(self, before: float | None, after: float | None) -> str:
        """Formats the change from `before` to `after`. Returns a dash if a value is missing."""
        if before is None or after is None:
            return "-"
        change = after - before
        if self.percent:
            return f"{100 * change:+.1f} points" if change else "="
        if not change:
            return "="
        share = f" ({_share(before, after)})" if before else ""
        return f"{change:+,.0f}{share}" if change == int(change) else f"{change:+,.1f}{share}"


def _share(before: float, after: float) -> str:
    """Formats a small change in percent, and a large change as a factor."""
    times = after / before
    return f"{100 * (times - 1):+.0f} %" if times < 3 else f"{times:,.1f} times"


ROWS = (
    Row("requests", lambda run: len(run.accounts)),
    Row("refused, too long", lambda run: run.num_refused),
    Row("steps", lambda run: len(run.samples)),
    Row("tokens generated", lambda run: run.num_generated_tokens),
    Row("queueing, steps, median", lambda run: middle(run.queued_steps)),
    Row("queueing, steps, p99", lambda run: percentile(run.queued_steps, 0.99)),
    Row("waited for a step's tokens, steps", lambda run: run.wait_steps[WaitReason.BUDGET]),
    Row("waited for max_num_seqs, steps", lambda run: run.wait_steps[WaitReason.MAX_SEQS]),
    Row("waited for blocks, steps", lambda run: run.wait_steps[WaitReason.NO_BLOCKS]),
    Row("time to first token, steps, median", lambda run: middle(run.first_token_steps)),
    Row("time to first token, steps, p99", lambda run: percentile(run.first_token_steps, 0.99)),
    Row("preemptions", lambda run: run.num_preemptions),
    Row("recomputed tokens", lambda run: run.num_recomputed_tokens),
    Row("prefix hit rate", lambda run: run.hit_rate, percent=True),
)


def comparison(logged: RunStatistics, what_if: RunStatistics) -> str:
    lines = [("", "logged", "what if", "change")]
    for row in ROWS:
        before, after = row.measure(logged), row.measure(what_if)
        lines.append((row.name, row.show(before), row.show(after), row.show_change(before, after)))
    return aligned(lines)


def figures(run: RunStatistics) -> dict[str, str]:
    return {row.name: row.show(row.measure(run)) for row in ROWS}


def summary(run: RunStatistics) -> str:
    """A summary of one run in two lines."""
    shown = figures(run)
    return (
        f"{shown['requests']} requests, {shown['steps']} steps, "
        f"{shown['tokens generated']} tokens generated\n"
        f"{shown['preemptions']} preemptions, {shown['recomputed tokens']} recomputed tokens, "
        f"{shown['prefix hit rate']} of the prompts found in the cache"
    )


def aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]
        ).rstrip()
        for first, *rest in lines
    )
