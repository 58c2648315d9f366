"""Traces that are kept in memory where no collector is set: the newest ones, within bounds."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field


class SpanRole(enum.Enum):
    """What a span stands for in its trace."""

    REQUEST = "request"
    """It is the whole of a client's request here: the trace can be listed."""
    STEP = "step"
    """It has no parent and is no client's request: the trace is that of an engine step."""
    PART = "part"
    """Any other one."""


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """A span as it came, in OTLP's bytes, with the service that made it and, of a request, its id
    and its tenant's; both are empty elsewhere.
    """

    service: str
    encoded: bytes
    role: SpanRole = SpanRole.PART
    request_id: str = ""
    tenant_id: str = ""
    is_wanted: bool = False
    """Whether the trace is kept for what the request was: failed or slow."""


@dataclass(slots=True)
class StoredTrace:
    """The spans of a trace that came so far."""

    trace_id: str
    spans: list[StoredSpan] = field(default_factory=list)
    num_bytes: int = 0
    root: StoredSpan | None = None
    """The span of the client's request, once that has ended, or of one that runs."""
    encoded: set[bytes] = field(default_factory=set)
    """The spans' bytes, where a span may come twice."""
    is_running: bool = False
    """Whether it was made of a request that runs: nothing of it is in the store."""

    @property
    def request_id(self) -> str:
        return "" if self.root is None else self.root.request_id

    @property
    def tenant_id(self) -> str:
        return "" if self.root is None else self.root.tenant_id


class TraceStore:
    """At most `max_traces` traces and `max_bytes` bytes of spans; the oldest are dropped for new
    ones. Half of either is for requests that have ended: engine steps cannot displace them. Of the
    rest, steps are dropped before requests that go on. A trace alone takes an eighth of the bytes
    at most; its further spans are dropped.

    Of the requests that have ended, those that are wanted for what they were are dropped after the
    others, as long as they are at most a quarter of `max_traces`, and those that lists showed last
    as long as they are at most an eighth.
    """

    def __init__(self, max_traces: int, max_bytes: int) -> None:
        self._max_traces = max_traces
        self._max_bytes = max_bytes
        self._ended: dict[str, StoredTrace] = {}
        """Traces of requests that have ended."""
        self._others: dict[str, StoredTrace] = {}
        self._steps: dict[str, None] = {}
        """Of the others, those of engine steps."""
        self._wanted: dict[str, None] = {}
        """Of those that have ended, the ones that are wanted for what they were."""
        self._shown: dict[str, None] = {}
        """Of those that have ended, the ones that lists showed last."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._ended) + len(self._others)

    def add(self, trace_id: str, span: StoredSpan) -> None:
        """Adds a span to its trace, which may be new, unless it is there: a service sends what it
        had no answer for again. Trace ids are 32 hexadecimal digits.
        """
        trace = self._ended.get(trace_id) or self._others.get(trace_id) or StoredTrace(trace_id)
        size = len(span.encoded)
        if span.encoded in trace.encoded or trace.num_bytes + size > self._max_bytes // 8:
            return
        trace.spans.append(span)
        trace.encoded.add(span.encoded)
        trace.num_bytes += size
        self.num_bytes += size
        if span.role is SpanRole.REQUEST:
            trace.root = span
            self._others.pop(trace_id, None)
            self._steps.pop(trace_id, None)
            if span.is_wanted:
                _keep_newest(self._wanted, trace_id, self._max_traces // 4)
        if trace.root is not None:
            self._ended[trace_id] = trace
        else:
            self._others[trace_id] = trace
            if span.role is SpanRole.STEP:
                self._steps[trace_id] = None
        while len(self) > self._max_traces or self.num_bytes > self._max_bytes:
            self._drop_one()

    def shown(self, trace_id: str) -> None:
        """Notes that a list showed a trace, which may be read next."""
        _keep_newest(self._shown, trace_id, self._max_traces // 8)

    def find(self, name: str) -> StoredTrace | None:
        """The trace of that id, or the newest one of the request of that id. A client's own id, and
        the id of one sequence of a request, are found too: the request's ends with the one, and
        begins the other.
        """
        trace_id = name.lower()
        if (found := self._ended.get(trace_id) or self._others.get(trace_id)) is not None:
            return found
        return next((one for one in self.requests() if is_called(one.request_id, name)), None)

    def requests(self) -> Iterator[StoredTrace]:
        """Traces of requests that have ended, the last one first."""
        return reversed(self._ended.values())

    def _drop_one(self) -> None:
        ended_bytes = sum(trace.num_bytes for trace in self._ended.values())
        if len(self._ended) > self._max_traces // 2 or ended_bytes > self._max_bytes // 2:
            oldest = next(iter(self._ended))
            wanted, shown = self._wanted, self._shown
            others = (one for one in self._ended if one not in wanted and one not in shown)
            trace = self._ended.pop(next(others, oldest))
            wanted.pop(trace.trace_id, None)
            shown.pop(trace.trace_id, None)
        else:
            trace = self._others.pop(next(iter(self._steps), None) or next(iter(self._others)))
            self._steps.pop(trace.trace_id, None)
        self.num_bytes -= trace.num_bytes


def _keep_newest(ids: dict[str, None], trace_id: str, most: int) -> None:
    """Adds an id as the newest one, in place of the oldest if there are too many."""
    ids.pop(trace_id, None)
    ids[trace_id] = None
    if len(ids) > most:
        del ids[next(iter(ids))]


def is_called(request_id: str, name: str) -> bool:
    """Whether the name is a request's id, the client's own one for it, or that of a sequence."""
    if not request_id:
        return False
    return request_id == name or request_id.endswith(f"-{name}") or name.startswith(request_id)
