"""The bodies of answers with traces and the activity of replicas, which displays such as /ui
read.
"""

from typing import Any

from services.gateway.adapters.http.openapi.answers import Answer


class ProgramTurn(Answer):
    """A turn of a program: its number, and the tool and the pause before it. `recomputed_tokens`
    is the number of tokens of its context that were not cached any more.
    """

    number: int
    tool: str
    pause_seconds: float | None
    context_tokens: int
    recomputed_tokens: int


class TraceSummary(Answer):
    """A request that has ended or is running. For a running request, `seconds` is its time so far,
    and `num_spans` is 1. `error` is null if nothing failed. `turn` is null unless a program is
    queried.
    """

    trace_id: str
    request_id: str
    name: str
    started_unix_seconds: float
    seconds: float
    error: str | None
    is_running: bool
    num_spans: int
    attributes: dict[str, Any]
    turn: ProgramTurn | None = None


class Traces(Answer):
    """An answer of /traces: a list of requests, and the number of ended requests whose traces are
    stored.
    """

    are_kept: bool
    num_kept: int
    traces: list[TraceSummary]


class SpanEvent(Answer):
    """An event of a span. `at` is the time in seconds since the trace began."""

    name: str
    at: float
    attributes: dict[str, Any]


class TraceSpan(Answer):
    """A span. `start` is the time in seconds since the trace began."""

    span_id: str
    parent_id: str
    depth: int
    name: str
    service: str
    start: float
    seconds: float
    error: str | None
    attributes: dict[str, Any]
    events: list[SpanEvent]
    num_links: int


class TracePart(Answer):
    """A part of a request's time. If the request waited for a resource, `waited_for` is the id of
    the request that used most of it. `step` is the engine step in which the request's longest wait
    began. Both may be null.
    """

    name: str
    seconds: float
    explanation: str
    waited_for: str | None
    step: int | None


class TraceTime(Answer):
    """The durations of a request's parts. Their sum is the total time."""

    line: str
    seconds: float
    parts: list[TracePart]


class Trace(Answer):
    """An answer of /traces/{name}: the spans of a request, parents before children. The trace of a
    running request contains the spans that have begun. Unfinished spans have the attribute
    stepwell.is_running.
    """

    trace_id: str
    request_id: str
    is_complete: bool
    is_running: bool
    started_unix_seconds: float
    time: TraceTime | None
    spans: list[TraceSpan]


class QueuedSequence(Answer):
    """A sequence that waits at the gateway, and the reason. The id is empty if the sequence belongs
    to another tenant.
    """

    request_id: str
    wait_reason: str
    seconds: float | None


class ReplicaRequest(Answer):
    """A sequence that runs or waits at a replica. `key` identifies it in steps and blocks. The ids
    are empty if the sequence belongs to another tenant.
    """

    key: int
    request_id: str
    trace_id: str
    state: str
    wait_reason: str | None
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class ReplicaStep(Answer):
    """A finished step. `keys` has the keys of its first requests, and `num_tokens` has the token
    counts of these requests in the same order.
    """

    step: int
    began_unix_seconds: float
    seconds: float
    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    wait_reason: str | None
    keys: list[int]
    num_tokens: list[int]


class ReplicaBlocks(Answer):
    """The pool's blocks, drawn as cells. Each cell has a digit for its state (1 free without cached
    content, 2 free and cached, 3 used by one request, 4 shared by several, 5 free and of a paused
    program), and the key of a request that uses it, or 0.
    """

    blocks_per_cell: int
    states: str
    owners: list[int]
    num_blank: int
    num_cached: int
    num_held: int
    num_shared: int
    num_retained: int


class PausedProgram(Answer):
    """A program of an agent between two turns. `num_blocks` blocks of its context are still
    cached.
    """

    program: str
    tool: str
    seconds: float
    num_turns: int
    num_tokens: int
    num_blocks: int


class ReplicaActivity(Answer):
    """The activity of a replica. `stats` is null if the replica's scheduler does not answer."""

    address: str
    name: str
    model: str
    ready: bool
    reason: str
    unfinished_here: int
    cached_tokens: int | None
    directory: str
    stats: dict[str, Any] | None
    requests: list[ReplicaRequest]
    steps: list[ReplicaStep]
    blocks: ReplicaBlocks | None
    programs: list[PausedProgram]


class Activity(Answer):
    """An answer of /activity."""

    model: str
    unix_seconds: float
    draining: bool
    requests_in_flight: int
    queued: list[QueuedSequence]
    replicas: list[ReplicaActivity]


class HistoryEvent(Answer):
    """An event at a replica. If `replica` is empty, the event happened at the gateway. `count` is
    the number of equal events that were merged.
    """

    unix_seconds: float
    kind: str
    replica: str
    text: str
    count: int


class History(Answer):
    """An answer of /activity/history: parallel lists with a value for each time bin, the oldest
    first. A latency is a pair of median and 99th percentile, or null if no request ended in the
    bin.
    """

    unix_seconds: float
    bin_seconds: int
    began_unix_seconds: list[int]
    first_token_seconds: list[list[float] | None]
    per_token_seconds: list[list[float] | None]
    request_seconds: list[list[float] | None]
    num_ended: list[int]
    num_refused: list[int]
    num_failed: list[int]
    num_tokens: list[int]
    num_running: list[int]
    num_waiting: list[int]
    held_share: list[float]
    events: list[HistoryEvent]
