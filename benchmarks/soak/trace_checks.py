"""Whether traces explain where the time of requests went: sums, reasons, parents, ends."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.common.spans import SpanRecord
from benchmarks.common.tables import table_text
from services.common import names

MAX_UNEXPLAINED = 0.02
"""Share of a request's time at the replica that its parts may leave out, at the 99th percentile."""
SLACK_NANOS = 2_000_000
"""Clocks of two processes on one machine; each reads its own."""
LATE_END_NANOS = 2_000_000_000
"""A request that was aborted, or left its replica, ends there when the replica hears of it."""
LOST_NANOS = 5_000_000_000
"""Spans that a service had not sent are lost when it is killed. Others end the calls from it a
little later.
"""

_WAITING = (names.SPAN_REQUEST_QUEUE, names.SPAN_REQUEST_PREEMPTED, names.SPAN_REQUEST_RECOVERY)
_DIVIDED = (names.SPAN_REQUEST, names.SPAN_REQUEST_PREFILL, *_WAITING)
"""Spans whose children fill them."""
_WAIT = "wait."


@dataclass(slots=True)
class TraceReport:
    """What is wrong with the spans of some requests, in words, and what they hold."""

    num_requests: int
    unexplained: list[float] = field(default_factory=list)
    """Share of the time of each request at a replica that no part covers."""
    counts: Counter[str] = field(default_factory=Counter)
    """Spans of requests by name; interruptions by their cause."""
    num_lost: int = 0
    """Spans whose parent, and stays whose spans, ended with a service that was killed."""
    faults: list[str] = field(default_factory=list)

    @property
    def p99_unexplained(self) -> float:
        """At the 99th percentile; 1 if there is no request."""
        ordered = sorted(self.unexplained)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] if ordered else 1.0

    @property
    def is_good(self) -> bool:
        """Whether the time of all requests is explained."""
        return not self.faults and self.p99_unexplained <= MAX_UNEXPLAINED

    def text(self) -> str:
        """As a table, and the first faults."""
        rows = [
            ("requests", str(self.num_requests)),
            ("stays at a replica", str(len(self.unexplained))),
            ("time without a part, p99", f"{100 * self.p99_unexplained:.3f} %"),
            ("lost with a service that was killed", str(self.num_lost)),
            *((name, str(count)) for name, count in sorted(self.counts.items())),
            ("faults", str(len(self.faults))),
        ]
        return "\n".join([table_text(("traces", "count"), rows), *self.faults[:20]])


def check_traces(
    spans: Sequence[SpanRecord], requests: Iterable[tuple[bytes, bytes]], kills: Sequence[int]
) -> TraceReport:
    """Checks the spans of requests, each given by its trace and the client's span, and of steps.
    `kills`: when services were killed, in nanoseconds since the epoch.
    """
    wanted = list(requests)
    report = TraceReport(len(wanted))
    by_id = {span.span_id: span for span in spans}
    children: dict[bytes, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        children[span.parent_id].append(span)
    clients = {client for _, client in wanted}
    for span in spans:
        _check_span(span, by_id, clients, kills, report)
    traces = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    for trace_id, client in wanted:
        roots = [span for span in traces[trace_id] if span.parent_id == client]
        stays = [span for span in traces[trace_id] if span.name == names.SPAN_REQUEST]
        if len(roots) != 1:
            report.faults.append(f"{trace_id.hex()} has {len(roots)} spans under the client's")
        if not stays and roots and _was_lost(roots[0], kills):
            report.num_lost += 1
        elif not stays:
            report.faults.append(f"{trace_id.hex()} has no {names.SPAN_REQUEST}")
        for stay in stays:
            _check_stay(stay, children, report)
    return report


def _check_span(
    span: SpanRecord,
    by_id: dict[bytes, SpanRecord],
    clients: set[bytes],
    kills: Sequence[int],
    report: TraceReport,
) -> None:
    if not 0 < span.start <= span.end:
        report.faults.append(f"{span.name} begins at {span.start} and ends at {span.end}")
    if not span.parent_id or span.parent_id in clients:
        return
    parent = by_id.get(span.parent_id)
    if parent is None:
        if _was_lost(span, kills):
            report.num_lost += 1
        else:
            report.faults.append(f"{span.name} has a parent that was not received")
        return
    allowed = SLACK_NANOS if parent.name in _OWN else LATE_END_NANOS
    if span.start < parent.start - SLACK_NANOS or span.end > parent.end + allowed:
        late = (span.end - parent.end) / 1e6
        report.faults.append(f"{span.name} ends {late:.1f} ms after its parent {parent.name}")


_OWN = (
    *_DIVIDED,
    names.SPAN_STEP,
    names.SPAN_STEP_TRANSACT,
    names.SPAN_STEP_EXECUTE,
)
"""Parents which no other service can make end earlier."""


def _was_lost(span: SpanRecord, kills: Sequence[int]) -> bool:
    return any(kill - LOST_NANOS < span.end < kill + LATE_END_NANOS for kill in kills)


def _check_stay(
    stay: SpanRecord, children: dict[bytes, list[SpanRecord]], report: TraceReport
) -> None:
    if names.ATTR_FINISH_REASON not in stay.attributes:
        report.counts["stays without an end"] += 1
    explained = 0
    for phase in children[stay.span_id]:
        parts = children[phase.span_id]
        report.counts[phase.name] += 1
        explained += sum(part.nanos for part in parts) if phase.name in _DIVIDED else phase.nanos
        if phase.name in (names.SPAN_REQUEST_PREEMPTED, names.SPAN_REQUEST_RECOVERY):
            cause = phase.attributes.get(names.ATTR_CAUSE)
            report.counts[f"cause {cause}"] += 1
            if not cause:
                report.faults.append(f"{phase.name} has no cause")
        for part in parts:
            _check_part(phase, part, report)
    gap = abs(stay.nanos - explained)
    report.unexplained.append(gap / max(1, stay.nanos))


def _check_part(phase: SpanRecord, part: SpanRecord, report: TraceReport) -> None:
    report.counts[part.name] += 1
    if part.name.startswith(_WAIT):
        reason = part.attributes.get(names.ATTR_WAIT_REASON)
        if not reason or part.name != f"{_WAIT}{reason}":
            report.faults.append(f"{part.name} in {phase.name} has the reason {reason!r}")
    elif phase.name in _WAITING:
        report.faults.append(f"{phase.name} holds a {part.name}, which is no wait")
