"""What each hop of a decode step costs, from traces and from when tokens arrive.

The services are not changed for it: steps are traced at 100 %, requests are not, but for a few
probes. A span of a step tells planning, pool and worker, each from both sides. A session straight
to the scheduler tells when a step's tokens leave it, the probes when they reach a client.
"""

import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.common.clients import HttpClient, SessionClient
from benchmarks.common.load import Load, RequestTimes, run_load
from benchmarks.common.spans import SpanRecord
from benchmarks.common.stack import Stack
from services.common import names

PROBE_EVERY = 8
_SAMPLED, _UNSAMPLED = 1, 0

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
    """What was sent and seen at one concurrency; times in nanoseconds since the epoch."""

    concurrency: int
    begun: int
    ended: int = 0
    probes: dict[bytes, RequestTimes] = field(default_factory=dict)
    """Requests through HTTP by their trace id."""
    session: list[tuple[int, int]] = field(default_factory=list)
    """Step, and when its tokens had reached the session."""


async def run_hops(stack: Stack, load: Load) -> HopRun:
    """Sends a load through HTTP with probes, then one like it straight to the scheduler."""
    run = HopRun(load.concurrency, time.time_ns())
    total = load.concurrency * load.requests_each
    trace_ids = [secrets.token_bytes(16) for _ in range(total)]
    is_probe = [number % PROBE_EVERY == min(total, PROBE_EVERY) // 2 for number in range(total)]
    traceparents = [
        f"00-{trace_id.hex()}-{secrets.token_hex(8)}-{_SAMPLED if probe else _UNSAMPLED:02x}"
        for trace_id, probe in zip(trace_ids, is_probe, strict=True)
    ]
    client = HttpClient(stack.http)
    await client.open(load.concurrency)
    times = await run_load(client, load, traceparents)
    await client.close()
    run.probes = {
        trace_id: taken
        for trace_id, taken, probe in zip(trace_ids, times, is_probe, strict=True)
        if probe
    }
    session = SessionClient(stack.scheduler)
    prompts = [load.prompt(total + number) for number in range(load.concurrency)]
    async for deltas in session.deltas(prompts, load.output_tokens):
        run.session.append((deltas.step, time.time_ns()))
    await session.close()
    run.ended = time.time_ns()
    return run


def median_hops(run: HopRun, spans: Iterable[SpanRecord]) -> dict[str, float | None]:
    """Median microseconds of each hop over the decode steps of a run; None where there was none.

    Only steps that give every request exactly one token count.
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
    started = worker.events["started"]
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
    """From the end of each step to its token at the client, for one request.

    Of its steps the first ones may be chunks of its prompt, and a last one may have been planned
    before its end was known: the latest assignment in which no token comes before its step ends.
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
