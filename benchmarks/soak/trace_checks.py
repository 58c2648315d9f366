"""Checks that traces explain the time of requests.

The leaf spans of a request must cover its time, each wait must have a reason, and each span must
have a parent and lie within it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.common.figures import percentile
from benchmarks.common.spans import SpanRecord
from benchmarks.common.tables import table_text
from services.common.telemetry import names

MAX_UNEXPLAINED = 0.02
"""The largest fraction of a request's time that may lack leaf spans. The 99th percentile over
requests must not exceed it.
"""
SLACK_NANOS = 2_000_000
"""Tolerance for clocks of two processes on one machine that differ."""
LATE_END_NANOS = 2_000_000_000
"""The nanoseconds by which a replica's span may end after its parent span if the request was
aborted or moved to another replica, because the replica learns that with a delay.
"""
LOST_NANOS = 5_000_000_000
"""The nanoseconds before a kill in which ended spans may be lost, because the killed service had
not exported them. Other services' spans of calls to it may end shortly after the kill.
"""

_WAITING = (names.SPAN_REQUEST_QUEUE, names.SPAN_REQUEST_PREEMPTED, names.SPAN_REQUEST_RECOVERY)
"""Spans in which a request only waits."""
_WAIT = "wait."
_REASONS = {
    names.SPAN_GATEWAY_WAIT: names.ATTR_WAIT_REASON,
    names.SPAN_GATEWAY_RESUBMIT: names.ATTR_RESUBMIT_CAUSE,
    names.SPAN_REQUEST_PREEMPTED: names.ATTR_CAUSE,
    names.SPAN_REQUEST_RECOVERY: names.ATTR_CAUSE,
}
"""Maps the names of spans in which a request waits to the attribute with the reason."""
_BESIDE = (names.SPAN_POOL_ADMIT,)
"""Spans of another service's concurrent work, which do not count as time of the request."""
_DECODE_SUMS = (
    names.ATTR_COMPUTE_SECONDS,
    names.ATTR_OTHERS_PREFILL_SECONDS,
    names.ATTR_STEP_AHEAD_SECONDS,
    names.ATTR_OVERHEAD_SECONDS,
)
_FINISHED, _REFUSED = "finished", "refused"
"""Outcomes of a request at a replica, as the gateway records them in its span."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that a client sent, with the ids in its `traceparent`."""

    trace_id: bytes
    span_id: bytes
    sent: int
    """Time of sending by the client's clock, in nanoseconds since the epoch."""
    answered: int
    """Time at which the answer was complete, in nanoseconds since the epoch."""


@dataclass(slots=True)
class TraceReport:
    """The defects found in the spans of all checked requests, and statistics of the spans."""

    num_requests: int
    unexplained: list[float] = field(default_factory=list)
    """For each request, the fraction of its time that is covered by no leaf span or by several."""
    elsewhere: list[float] = field(default_factory=list)
    """For each request, the fraction of the client's time that is outside the gateway's span."""
    counts: Counter[str] = field(default_factory=Counter)
    """Maps span names to numbers of spans, and causes of interruptions to their numbers."""
    num_lost: int = 0
    """The number of spans without a parent, or without the replica's span below them, because the
    service that should have exported this span was killed.
    """
    faults: list[str] = field(default_factory=list)

    @property
    def p99_unexplained(self) -> float:
        """The 99th percentile of the unexplained fractions. It is 1 if there is no request."""
        return percentile(self.unexplained or [1.0], 99)

    @property
    def is_good(self) -> bool:
        """Whether no fault was found and the unexplained fraction is within its limit."""
        return not self.faults and self.p99_unexplained <= MAX_UNEXPLAINED

    def text(self) -> str:
        """The report as a table, followed by the first defects."""
        elsewhere = self.elsewhere or [1.0]
        rows = [
            ("requests", str(self.num_requests)),
            ("time without a part, p99", f"{100 * self.p99_unexplained:.3f} %"),
            ("time without a part, most", f"{100 * max(self.unexplained, default=1.0):.3f} %"),
            ("client's time outside, p50", f"{100 * percentile(elsewhere, 50):.3f} %"),
            ("client's time outside, p99", f"{100 * percentile(elsewhere, 99):.3f} %"),
            ("lost with a service that was killed", str(self.num_lost)),
            *((name, str(count)) for name, count in sorted(self.counts.items())),
            ("faults", str(len(self.faults))),
        ]
        return "\n".join([table_text(("traces", "count"), rows), *self.faults[:20]])


def check_traces(
    spans: Sequence[SpanRecord], requests: Sequence[TracedRequest], kills: Sequence[int]
) -> TraceReport:
    """Checks the spans of requests and steps. `kills` are in nanoseconds since the epoch."""
    return _Checks(spans, requests, kills).run()


class _Checks:
    """Indexes the spans of a run and checks them."""

    def __init__(
        self, spans: Sequence[SpanRecord], requests: Sequence[TracedRequest], kills: Sequence[int]
    ) -> None:
        self._spans = spans
        self._requests = requests
        self._kills = kills
        self._by_id = {span.span_id: span for span in spans}
        self._children: dict[bytes, list[SpanRecord]] = defaultdict(list)
        for span in spans:
            self._children[span.parent_id].append(span)
        self._report = TraceReport(len(requests))

    def run(self) -> TraceReport:
        clients = {request.span_id for request in self._requests}
        for span in self._spans:
            self._check_span(span, clients)
        for request in self._requests:
            roots = self._children[request.span_id]
            if len(roots) != 1:
                trace = request.trace_id.hex()
                self._fault(f"{trace} has {len(roots)} spans under the client's")
            for root in roots:
                self._check_request(request, root)
        return self._report

    def _fault(self, text: str) -> None:
        self._report.faults.append(text)

    def _was_lost(self, span: SpanRecord) -> bool:
        return any(kill - LOST_NANOS < span.end < kill + LATE_END_NANOS for kill in self._kills)

    def _check_span(self, span: SpanRecord, clients: set[bytes]) -> None:
        """Checks that a span does not end before it begins, has a parent, and lies within it."""
        if not 0 < span.start <= span.end:
            self._fault(f"{span.name} begins at {span.start} and ends at {span.end}")
        if not span.parent_id or span.parent_id in clients:
            return
        parent = self._by_id.get(span.parent_id)
        if parent is None:
            if self._was_lost(span):
                self._report.num_lost += 1
            else:
                self._fault(f"{span.name} has a parent that was not received")
            return
        allowed = LATE_END_NANOS if _was_left(parent) else SLACK_NANOS
        if span.start < parent.start - SLACK_NANOS:
            early = (parent.start - span.start) / 1e6
            self._fault(f"{span.name} begins {early:.1f} ms before its parent {parent.name}")
        if span.end > parent.end + allowed:
            late = (span.end - parent.end) / 1e6
            self._fault(f"{span.name} ends {late:.1f} ms after its parent {parent.name}")

    def _check_request(self, request: TracedRequest, root: SpanRecord) -> None:
        if root.start < request.sent - SLACK_NANOS:
            self._fault(f"{root.name} begins before its client sent it")
        measured = max(1, request.answered - request.sent)
        self._report.elsewhere.append((measured - root.nanos) / measured)
        explained = self._explained(root, root.start, root.end)
        self._report.unexplained.append(abs(root.nanos - explained) / max(1, root.nanos))
        below = list(self._below(root))
        if names.SPAN_GATEWAY_ENGINE not in {span.name for span in below}:
            self._fault(f"{request.trace_id.hex()} has no {names.SPAN_GATEWAY_ENGINE}")
        for span in below:
            self._report.counts[span.name] += 1
            self._check_part(span)

    def _below(self, span: SpanRecord) -> Iterator[SpanRecord]:
        for child in self._children[span.span_id]:
            yield child
            yield from self._below(child)

    def _explained(self, span: SpanRecord, start: int, end: int) -> int:
        """The nanoseconds between `start` and `end` that the leaf spans below `span` cover.

        If a request has several sequences, the result is for the sequence whose spans cover the
        time worst. A stay (the gateway's span of a request at a replica) counts as a leaf if it
        lacks the replica's span. `_check_stay` checks that the replica was killed then.
        """
        start, end = max(start, span.start), min(end, span.end)
        parts = [part for part in self._children[span.span_id] if part.name not in _BESIDE]
        is_stay = span.name == names.SPAN_GATEWAY_ENGINE
        if not parts or (is_stay and all(part.name != names.SPAN_REQUEST for part in parts)):
            return max(0, end - start)
        sums: Counter[object] = Counter()
        for part in parts:
            sequence = part.attributes.get(names.ATTR_SEQUENCE)
            sums[sequence] += self._explained(part, start, end)
        return max(sums.values(), key=lambda nanos: abs(end - start - nanos))

    def _check_part(self, span: SpanRecord) -> None:
        """Checks the attributes that spans of this kind require."""
        parts = self._children[span.span_id]
        if (attribute := _REASONS.get(span.name)) is not None:
            reason = span.attributes.get(attribute)
            if not reason:
                self._fault(f"{span.name} has no {attribute}")
            kind = "cause" if attribute == names.ATTR_CAUSE else span.name
            self._report.counts[f"{kind} {reason}"] += 1
        if span.name == names.SPAN_GATEWAY_ENGINE:
            self._check_stay(span)
        elif span.name == names.SPAN_REQUEST and names.ATTR_FINISH_REASON not in span.attributes:
            self._report.counts["stays without an end"] += 1
        elif span.name == names.SPAN_REQUEST_DECODE:
            self._check_decode(span)
        elif span.name.startswith(_WAIT):
            reason = span.attributes.get(names.ATTR_WAIT_REASON)
            if not reason or span.name != f"{_WAIT}{reason}":
                self._fault(f"{span.name} has the reason {reason!r}")
        elif span.name in _WAITING:
            for part in parts:
                if not part.name.startswith(_WAIT):
                    self._fault(f"{span.name} holds a {part.name}, which is no wait")

    def _check_stay(self, stay: SpanRecord) -> None:
        """Checks that a stay, the gateway's span of a request at a replica, has the replica's span.

        The span may be missing if the replica refused the request or was killed.
        """
        made = [span.name for span in self._children[stay.span_id]]
        if names.SPAN_REQUEST in made or stay.attributes.get(names.ATTR_OUTCOME) == _REFUSED:
            return
        if self._was_lost(stay):
            self._report.num_lost += 1
        else:
            self._fault(f"{stay.name} has no {names.SPAN_REQUEST}")

    def _check_decode(self, decode: SpanRecord) -> None:
        """Checks that the phases of a decode span add up to its time."""
        seconds = sum(float(decode.attributes.get(name, 0)) for name in _DECODE_SUMS)
        if abs(seconds * 1e9 - decode.nanos) > MAX_UNEXPLAINED * decode.nanos:
            self._fault(f"{decode.name} of {decode.nanos / 1e9:g} s is divided into {seconds:g} s")


def _was_left(span: SpanRecord) -> bool:
    """Whether the span is a stay that the gateway ended before the replica finished the request."""
    outcome = span.attributes.get(names.ATTR_OUTCOME)
    return span.name == names.SPAN_GATEWAY_ENGINE and outcome != _FINISHED
