"""Detects growth in each process over the samples of an endurance run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.process_usage import Usage
from benchmarks.soak.slope import Slope, slope_of

MB = 1e6
GROWN_BYTES = 8e6
"""Memory growth, in bytes, that is tolerated in a process. Heaps shrink and grow again, and some
pages are touched for the first time only late.
"""
MORE_HANDLES = 16
"""The tolerated number of additional threads, or additional files, which the load explains."""
_HOUR = 3600.0
_EDGE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """The resource usage of each process `seconds` after the load began."""

    seconds: float
    usages: Mapping[str, Usage]


@dataclass(frozen=True, slots=True)
class Finding:
    """How one process changed between the end of the warm-up and the end of the run.

    Memory is in bytes, and the slope is in bytes per second. `threads` and `files` are pairs of the
    number before and the number after. `complaint` states what grew and by how much. It is empty if
    nothing grew too much.
    """

    process: str
    rss_before: float
    rss_after: float
    pss_after: float
    slope: Slope
    threads: tuple[int, int]
    files: tuple[int, int]
    complaint: str


def findings(
    samples: Sequence[Sample], warm_up_seconds: float, bound_mb_per_hour: float
) -> tuple[Finding, ...]:
    """Compares the first and the last samples of each process after the warm-up.

    Memory is the mean over the first tenth, and the mean over the last tenth, of the samples after
    the warm-up. Threads and files are the maxima in these tenths.
    """
    counted = [sample for sample in samples if sample.seconds >= warm_up_seconds]
    return tuple(
        _finding(
            name,
            [(sample.seconds, sample.usages[name]) for sample in counted],
            bound_mb_per_hour * MB / _HOUR,
        )
        for name in samples[0].usages
    )


def _finding(name: str, series: Sequence[tuple[float, Usage]], bound: float) -> Finding:
    edge = max(int(len(series) * _EDGE_SHARE), 1)
    usages = [usage for _, usage in series]
    first, last = usages[:edge], usages[-edge:]
    rss_before, rss_after = (sum(u.rss for u in part) / edge for part in (first, last))
    slope = slope_of([(seconds, float(usage.rss)) for seconds, usage in series])
    threads, files = (
        (max(getattr(u, what) for u in first), max(getattr(u, what) for u in last))
        for what in ("num_threads", "num_files")
    )
    complaints = []
    if slope.at_least > bound and rss_after - rss_before > GROWN_BYTES:
        complaints.append(f"memory by {(rss_after - rss_before) / MB:.1f} MB")
    for what, (before, after) in (("threads", threads), ("files", files)):
        if after > before + MORE_HANDLES:
            complaints.append(f"{what} from {before} to {after}")
    return Finding(
        process=name,
        rss_before=rss_before,
        rss_after=rss_after,
        pss_after=sum(u.pss for u in last) / edge,
        slope=slope,
        threads=threads,
        files=files,
        complaint=", ".join(complaints),
    )


def table(found: Sequence[Finding]) -> str:
    rows = [
        "| process | RSS MB, after warm-up | at the end | MB per hour, 95 % | PSS MB | threads "
        "| files | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for finding in found:
        slope, margin = (x * _HOUR / MB for x in (finding.slope.value, finding.slope.margin))
        rows.append(
            f"| {finding.process} | {finding.rss_before / MB:.1f} | {finding.rss_after / MB:.1f} "
            f"| {slope:+.1f} ± {margin:.1f} | {finding.pss_after / MB:.1f} "
            f"| {finding.threads[0]} → {finding.threads[1]} "
            f"| {finding.files[0]} → {finding.files[1]} | {finding.complaint or 'flat'} |"
        )
    return "\n".join(rows)
