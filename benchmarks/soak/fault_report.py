"""Reports on the effects of faults."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.figures import percentile
from benchmarks.soak.checked_streams import Counts
from benchmarks.soak.fault_draws import Fault

_SHOWN_FAILURES = 10


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a fault: the longest time in which no stream received a token, and the longest
    gap between two tokens of one answer, both in seconds.
    """

    fault: Fault
    silence_seconds: float
    longest_gap_seconds: float
    recovered: bool


def report(effects: Sequence[Effect], counts: Counts) -> str:
    """The report on faults of which each was injected after the recovery from the one before."""
    kinds: dict[str, list[Effect]] = {}
    for effect in effects:
        kinds.setdefault(effect.fault.kind, []).append(effect)
    lines = [
        "| fault | times | silence s, median / longest | longest gap in an answer s |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, found in sorted(kinds.items()):
        silences = [effect.silence_seconds for effect in found]
        gap = max(effect.longest_gap_seconds for effect in found)
        lines.append(
            f"| {kind} | {len(found)} | {statistics.median(silences):.2f} / {max(silences):.2f} "
            f"| {gap:.2f} |"
        )
    stuck = sum(not effect.recovered for effect in effects)
    summary = f"{len(effects)} faults, {stuck} without recovery; {counts}"
    return "\n".join((*lines, "", summary, *_failures(counts)))


def storm_report(faults: Sequence[Fault], counts: Counts, left_over: str) -> str:
    """The report on faults that were injected at fixed intervals, without waiting for recovery.

    The silence of an answer is the longest time in which its client received no token. The time to
    the first token is included.
    """
    kinds = Counter(fault.kind for fault in faults)
    lines = ["| fault | times |", "| --- | ---: |"]
    lines += [f"| {kind} | {times} |" for kind, times in sorted(kinds.items())]
    lines += ["", f"{len(faults)} faults; {counts}"]
    if silences := counts.silences:
        lines.append(
            f"silence of an answer, s, median / p99 / longest: {statistics.median(silences):.2f} / "
            f"{percentile(silences, 99):.2f} / {max(silences):.2f}"
        )
    lines.append(f"at the end {left_over or 'all blocks are free and no request is left'}")
    return "\n".join((*lines, *_failures(counts)))


def _failures(counts: Counts) -> list[str]:
    return [
        f"{times} times {text}"
        for what in (counts.failed, counts.changed)
        for text, times in what.most_common(_SHOWN_FAILURES)
    ]
