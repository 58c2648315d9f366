"""Computes the cost of each hop of a decode step from traces and from the arrival times of tokens.

A hop is a part of a step, such as the transfer of its tokens to the gateway. The services run
unchanged. Every step is traced, but of the requests only a few, the probes. The spans of a step
show how long planning, the pool's work and the worker's work take, measured by the caller and by
the callee. In addition, the arrival times of tokens are recorded twice: by the clients of the
probes, and by a client that has a session (a stream) with the scheduler, as gateways have.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.common.load import RequestTimes
from benchmarks.common.spans import SpanRecord
from benchmarks.common.tables import number_text, table_text
from services.common.telemetry import names

PLAN = "scheduler: plan, the pool's answer aside"
TRANSACT = "scheduler ↔ kvpool: a transaction, there and back"
POOL = "— of which in the pool"
DISPATCH = "scheduler ↔ worker: a step there and its answer back"
QUEUE = "worker: wait behind the step ahead"
COMPUTE = "worker: forward and sampling"
TAKE_IN = "scheduler: take in the tokens"
STEP = "whole step, from its planning to its tokens"
DELIVER = "scheduler → gateway: the tokens of a step"
STREAM = "gateway → client: detokenize, write and read an event"
HOPS = (PLAN, TRANSACT, POOL, DISPATCH, QUEUE, COMPUTE, TAKE_IN, STEP, DELIVER, STREAM)


@dataclass(slots=True)
class HopRun:
    """The observations at one concurrency. Times are in nanoseconds since the epoch."""

    concurrency: int
    begun: int
    ended: int = 0
    probes: dict[bytes, RequestTimes] = field(default_factory=dict)
    """Maps the trace id of each probe (traced request) to the times of its HTTP request."""
    session: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of a step and the time at which its tokens arrived at the session."""


def median_hops(run: HopRun, spans: Iterable[SpanRecord]) -> dict[str, float | None]:
    """The median of each hop over the decode steps of a run, in microseconds, or None if it has no
    values. Steps in which some request gets no token, or several, are left out.
    """
    of_trace: dict[bytes, dict[str, list[SpanRecord]]] = defaultdict(lambda: defaultdict(list))
    steps: list[SpanRecord] = []
    for span in spans:
        if run.begun <= span.start and span.end <= run.ended:
            of_trace[span.trace_id][span.name].append(span)
            if span.name == names.SPAN_STEP:
                steps.append(span)
    steps.sort(key=lambda step: step.start)
    nanos: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        if _is_decode(step, run.concurrency):
            _take_step(step, of_trace[step.trace_id], nanos)
    deliveries = _deliveries(run, steps)
    lags = [lag for trace, taken in run.probes.items() for lag in _lags(taken, trace, steps)]
    medians = {hop: _median_micros(nanos[hop]) for hop in HOPS}
    medians[DELIVER] = _median_micros(deliveries)
    whole_way, first_part = _median_micros(lags), medians[DELIVER]
    if whole_way is not None and first_part is not None:
        medians[STREAM] = max(whole_way - first_part, 0.0)
    return medians


def hops_table(hops: Mapping[int, Mapping[str, float | None]]) -> str:
    """A table of each hop's median microseconds, with a column for each concurrency."""
    header = [f"{level} request{'s' if level > 1 else ''}" for level in hops]
    seen = [hop for hop in HOPS if any(found[hop] is not None for found in hops.values())]
    return table_text(
        ("hop of a decode step, median µs", *header),
        ((hop, *(number_text(found[hop], 0) for found in hops.values())) for hop in seen),
    )


def _is_decode(step: SpanRecord, concurrency: int) -> bool:
    counts = (names.ATTR_NUM_REQUESTS, names.ATTR_NUM_SCHEDULED_TOKENS)
    return all(step.attributes.get(count) == concurrency for count in counts)


def _take_step(
    step: SpanRecord, spans: dict[str, list[SpanRecord]], nanos: dict[str, list[int]]
) -> None:
    executes, workers = spans[names.SPAN_STEP_EXECUTE], spans[names.SPAN_WORKER_EXECUTE]
    if not executes or not workers:
        return
    execute, worker = executes[0], workers[0]
    transacts = [span.nanos for span in spans[names.SPAN_STEP_TRANSACT]]
    started = worker.events[names.EVENT_STARTED]
    nanos[STEP].append(step.nanos)
    nanos[PLAN].append(execute.start - step.start - sum(transacts))
    nanos[TRANSACT] += transacts
    nanos[POOL] += [span.nanos for span in spans[names.SPAN_POOL_TRANSACT]]
    nanos[DISPATCH].append(execute.nanos - worker.nanos)
    nanos[QUEUE].append(started - worker.start)
    nanos[COMPUTE].append(worker.end - started)
    nanos[TAKE_IN].append(step.end - execute.end)


def _deliveries(run: HopRun, steps: Sequence[SpanRecord]) -> list[int]:
    ends = {
        step.attributes[names.ATTR_STEP]: step.end
        for step in steps
        if _is_decode(step, run.concurrency)
    }
    return [arrived - ends[number] for number, arrived in run.session if number in ends]


def _lags(taken: RequestTimes, trace_id: bytes, steps: Sequence[SpanRecord]) -> list[int]:
    """The nanoseconds from the end of a step to the arrival of its token at the request's client,
    for each step with a token.

    The first steps may be prompt chunks, and the last step may have been planned before the
    request's end was known. So the tokens are assigned to consecutive steps: the latest ones that
    all end before their tokens arrive.
    """
    ends = [step.end for step in steps if trace_id in step.links]
    arrivals = [arrived for arrived, count in taken.arrivals for _ in range(count)]
    for first in range(len(ends) - len(arrivals), -1, -1):
        mine = ends[first : first + len(arrivals)]
        lags = [arrived - end for arrived, end in zip(arrivals, mine, strict=True)]
        if min(lags) >= 0:
            return lags
    return []


def _median_micros(nanos: Sequence[int]) -> float | None:
    return statistics.median(nanos) / 1e3 if nanos else None
