"""The bodies of the answers of /traces and /activity, which displays such as /ui read."""

from typing import Any

from services.gateway.adapters.http.openapi.answers import Answer


class ProgramTurn(Answer):
    """A turn (request) of an agent program: its number, and the tool that ran before it and for how
    long. `recomputed_tokens` is the number of earlier tokens that were no longer cached.
    """

    number: int
    tool: str
    pause_seconds: float | None
    context_tokens: int
    recomputed_tokens: int


class TraceSummary(Answer):
    """A request that has ended or is running. For a running request, `seconds` is the time since
    its arrival, and `num_spans` is 1. `error` is null if the request has not failed. `turn` is null
    unless the query names a program.
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
    """An answer of /traces: a list of requests, and the number `num_kept` of ended requests whose
    traces are stored.
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
    """A part of a request's time. If the request waited for a resource in this part, `waited_for`
    is the id of the request that used most of the resource, and `step` is the number of the engine
    step in which the longest wait began. Both may be null.
    """

    name: str
    seconds: float
    explanation: str
    waited_for: str | None
    step: int | None


class TraceTime(Answer):
    """The parts of a request's time. Their durations add up to `seconds`."""

    line: str
    seconds: float
    parts: list[TracePart]


class Trace(Answer):
    """An answer of /traces/{name}: the spans of a request, in which a parent precedes its children.
    The trace of a running request contains the spans that have begun. Unfinished spans have the
    attribute stepwell.is_running.
    """

    trace_id: str
    request_id: str
    is_complete: bool
    is_running: bool
    started_unix_seconds: float
    time: TraceTime | None
    spans: list[TraceSpan]


class QueuedSequence(Answer):
    """A sequence that waits at the gateway, with the reason. `request_id` is empty if the sequence
    belongs to another tenant.
    """

    request_id: str
    wait_reason: str
    seconds: float | None


class ReplicaRequest(Answer):
    """A sequence that runs or waits at a replica. `key` identifies the sequence in ReplicaStep and
    ReplicaBlocks. The ids are empty if the sequence belongs to another tenant.
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
    """A finished step. `keys` are the keys of the step's first requests, and `num_tokens` are the
    numbers of tokens that the step computed for these requests, in the same order.
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
    """The KV blocks of a pool, grouped into cells. For each cell, `states` has a digit (1 free
    without cached content, 2 free and cached, 3 used by one request, 4 shared by several requests,
    5 free and retained for an agent program's next request), and `owners` has the key of a request
    that uses the cell, or 0.
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
    """An agent program between two requests. `num_blocks` KV blocks of it are still cached."""

    program: str
    tool: str
    seconds: float
    num_turns: int
    num_tokens: int
    num_blocks: int


class ReplicaActivity(Answer):
    """The activity of a replica. `stats` is null if the replica's scheduler does not respond."""

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
    """An answer of /activity. `models` are all models of the gateway that the API key may use. The
    other fields are about `model`.
    """

    model: str
    models: list[str]
    unix_seconds: float
    draining: bool
    requests_in_flight: int
    queued: list[QueuedSequence]
    replicas: list[ReplicaActivity]


class HistoryEvent(Answer):
    """An event at a replica, or at the gateway if `replica` is empty. `count` is the number of
    equal events that were merged into this event.
    """

    unix_seconds: float
    kind: str
    replica: str
    text: str
    count: int


class History(Answer):
    """An answer of /activity/history: parallel lists with a value for each time bin, the oldest bin
    first. A latency is a pair of the median and the 99th percentile, or null if no request ended in
    the bin.
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
