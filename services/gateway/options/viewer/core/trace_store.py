"""Stores the newest traces in memory, within limits."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

MaySee = Callable[[str], bool]
"""Whether the requests of the caller with this id may be seen."""


class SpanRole(enum.Enum):
    REQUEST = "request"
    """The span of a client's whole request at this gateway, the root of a trace that is listed."""
    STEP = "step"
    """The root span of the trace of an engine step."""
    PART = "part"
    """Any other span."""


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """A span in OTLP encoding, with the name of the service that made it. `request_id` and
    `caller_id` are empty unless the span's role is REQUEST.
    """

    service: str
    encoded: bytes
    role: SpanRole = SpanRole.PART
    request_id: str = ""
    caller_id: str = ""
    is_wanted: bool = False
    """Whether the span's trace is kept for longer, because the request failed or was slow."""


@dataclass(slots=True)
class StoredTrace:
    trace_id: str
    spans: list[StoredSpan] = field(default_factory=list)
    num_bytes: int = 0
    roots: list[StoredSpan] = field(default_factory=list)
    """The spans of clients' requests. In a stored trace, these are the ended requests. Clients may
    choose trace ids, so a trace may have several requests, also of several callers.
    """
    encoded: set[bytes] = field(default_factory=set)
    """The encoded spans, by which repeated spans are detected."""
    is_running: bool = False
    """Whether the trace was made from a running request, so that it is not in the store."""

    @property
    def root(self) -> StoredSpan | None:
        """The span of the last request."""
        return self.roots[-1] if self.roots else None

    @property
    def request_id(self) -> str:
        return "" if self.root is None else self.root.request_id

    def of(self, may_see: MaySee) -> "StoredTrace | None":
        """Returns the trace with only the requests of callers that `may_see` accepts, but with all
        spans. Returns None if there are no such requests.
        """
        roots = [root for root in self.roots if may_see(root.caller_id)]
        return replace(self, roots=roots) if roots else None


class TraceStore:
    """Stores at most `max_traces` traces and `max_bytes` bytes of spans. When a limit is exceeded,
    the oldest traces are removed.

    Half of each limit is reserved for traces of ended requests, so that traces of engine steps and
    unfinished requests cannot displace them. Traces of steps are removed before traces of
    unfinished requests. Two groups of ended requests are removed last: up to `max_traces` / 4
    failed or slow requests, and up to `max_traces` / 8 recently listed requests.

    Spans of one trace beyond an eighth of `max_bytes` are dropped.
    """

    def __init__(self, max_traces: int, max_bytes: int) -> None:
        self._max_traces = max_traces
        self._max_bytes = max_bytes
        self._ended: dict[str, StoredTrace] = {}
        """Maps trace ids to the traces of ended requests, in order of their ends."""
        self._others: dict[str, StoredTrace] = {}
        self._steps: dict[str, None] = {}
        """Ids of the engine-step traces in `_others`."""
        self._wanted: dict[str, None] = {}
        """Ids of the failed or slow requests in `_ended`."""
        self._shown: dict[str, None] = {}
        """Ids of the recently listed requests in `_ended`."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._ended) + len(self._others)

    def add(self, trace_id: str, span: StoredSpan) -> None:
        """Adds a span to its trace, which may be new. Ignores a span that is already stored,
        because services repeat exports that were not confirmed. A trace id has 32 hexadecimal
        digits.
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
            trace.roots.append(span)
            self._others.pop(trace_id, None)
            self._steps.pop(trace_id, None)
            if span.is_wanted:
                _keep_newest(self._wanted, trace_id, self._max_traces // 4)
        if trace.roots:
            self._ended[trace_id] = trace
        else:
            self._others[trace_id] = trace
            if span.role is SpanRole.STEP:
                self._steps[trace_id] = None
        while len(self) > self._max_traces or self.num_bytes > self._max_bytes:
            self._drop_one()

    def shown(self, trace_id: str) -> None:
        """Marks a trace as recently listed, so that it is kept for a client that reads it next."""
        _keep_newest(self._shown, trace_id, self._max_traces // 8)

    def find(self, name: str, may_see: MaySee = lambda _: True) -> StoredTrace | None:
        """Returns the trace with the id `name`, or the newest trace of a request that `name`
        identifies (see `is_called`) and whose caller `may_see` accepts.
        """
        trace_id = name.lower()
        if (found := self._ended.get(trace_id) or self._others.get(trace_id)) is not None:
            return found
        for trace in self.requests():
            if any(
                is_called(one.request_id, name) for one in trace.roots if may_see(one.caller_id)
            ):
                return trace
        return None

    def requests(self) -> Iterator[StoredTrace]:
        """Iterates over the traces of ended requests, the newest first."""
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
    ids.pop(trace_id, None)
    ids[trace_id] = None
    if len(ids) > most:
        del ids[next(iter(ids))]


def is_called(request_id: str, name: str) -> bool:
    """Whether `name` identifies a request. `name` may be `request_id`, the client's own id (the end
    of `request_id`), or the id of one of the request's sequences (`request_id`-NUMBER).
    """
    if not request_id:
        return False
    is_end = request_id.endswith(f"-{name}")
    return request_id == name or is_end or name.startswith(f"{request_id}-")
