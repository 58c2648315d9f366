"""Measures each service's cost of tracing a step, without the step's own work.

    python -m benchmarks.serving.tracing_cost --endpoint http://127.0.0.1:4317 --ratio 0.01
                                              --requests 32

Runs the services' tracing code around a decode step that does nothing. Prints, as JSON, each
service's processor microseconds per step. The figures include creating the spans, and encoding and
sending them in the background. Without an endpoint the cost of disabled tracing is measured.
"""

import argparse
import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from opentelemetry.sdk.trace.sampling import Decision
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.pool.ids import RequestKey
from services.common.pool.operations import Operation, Outcome
from services.common.request.finish import FinishReason
from services.common.request.sampling import SamplingParams
from services.common.telemetry.tracing import Tracing, configure_tracing
from services.kvpool.adapters.telemetry import traced
from services.scheduler.adapters.telemetry.statistics import StepCounts
from services.scheduler.adapters.telemetry.step_tracer import StepTracer as SchedulerTracer
from services.scheduler.adapters.telemetry.traced_ports import TracedExecutor, TracedPool
from services.scheduler.core.output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request
from services.worker.adapters.telemetry import StepTracer as WorkerTracer
from services.worker.core.step import StepInput

NUM_STEPS = 10_000
_STEPS_PER_FLUSH = 100
"""Steps between two flushes of the exporter, which drops spans if too many are pending."""
_SAMPLED_STEPS = 1_000
_STEPS_PER_REQUEST = 64

Step = Callable[[int], Awaitable[None]]


class _IdlePool:
    async def transact(
        self,
        operations: Sequence[Operation],  # noqa: ARG002
        traceparent: str = "",  # noqa: ARG002
    ) -> Outcome:
        return Outcome(1)


class _IdleExecutor:
    async def submit(
        self,
        plan: SchedulerOutput,
        traceparent: str = "",  # noqa: ARG002
    ) -> asyncio.Future[ModelRunnerOutput]:
        answer: asyncio.Future[ModelRunnerOutput] = asyncio.get_running_loop().create_future()
        answer.set_result(ModelRunnerOutput([[0]] * len(plan.requests)))
        return answer


def scheduler_steps(tracing: Tracing, num_requests: int) -> Step:
    """Returns a function that runs a step of the scheduler. It creates the spans of the step, of
    the step's pool transaction and of its execution, with links to the requests. When a request
    ends, it creates the request's spans.
    """
    pool = TracedPool(_IdlePool(), tracing)
    executor = TracedExecutor(_IdleExecutor(), tracing)
    tracer = SchedulerTracer(tracing, StepCounts(), lambda: (), executor.end)
    ones, tokens = [1] * num_requests, [[0]] * num_requests
    requests: list[Request] = []

    async def step(number: int) -> None:
        is_first = number % _STEPS_PER_REQUEST == 0
        is_last = number % _STEPS_PER_REQUEST == _STEPS_PER_REQUEST - 1
        if is_first:
            requests[:] = [_request(row, _draw_traceparent(tracing)) for row in range(num_requests)]
            tracer.arrived(requests)
        traceparent = tracer.begin()
        await pool.transact([], traceparent)
        new = requests if is_first else []
        plan = SchedulerOutput(number, requests, ones, ones, new=new, num_tokens=num_requests)
        tracer.planned(plan)
        await (await executor.submit(plan, traceparent))
        for request in requests if is_last else ():
            request.finish(FinishReason.LENGTH)
        ended = requests if is_last else ()
        tracer.done(plan, EngineCoreOutputs(plan, tokens, {}, ended, num_requests))

    return step


def kvpool_steps(tracing: Tracing, num_requests: int) -> Step:
    """Returns a function that runs a step of the pool, which is one transaction."""
    answer = kvpool_pb2.TransactResponse(generation=1, num_free_blocks=1)
    apply = traced(lambda _hosted, _request: answer, tracing)
    sampler = _step_sampler(tracing, num_requests)
    hosted: Any = None  # the function that runs in the transaction ignores this argument

    async def step(number: int) -> None:
        apply(hosted, kvpool_pb2.TransactRequest(sequence=number, traceparent=sampler()))

    return step


def worker_steps(tracing: Tracing, num_requests: int) -> Step:
    """Returns a function that records the spans of one step of a worker."""
    tracer, sampler = WorkerTracer(tracing, 0), _step_sampler(tracing, num_requests)
    ones, rows = np.ones(num_requests, np.int32), np.arange(num_requests, dtype=np.int32)
    now = time.time_ns()

    async def step(number: int) -> None:
        tracer.record(sampler(), StepInput(1, number, rows, ones, ones), (now, now, now))

    return step


SERVICES = {"scheduler": scheduler_steps, "kvpool": kvpool_steps, "worker": worker_steps}


async def measure(
    service: str, endpoint: str, ratio: float, num_requests: int, num_steps: int
) -> float:
    """Runs steps of a service. Returns the processor time per step, in microseconds."""
    tracing = configure_tracing(service, endpoint, ratio)
    step = SERVICES[service](tracing, num_requests)
    await step(0)
    begun = time.process_time_ns()
    for number in range(1, num_steps + 1):
        await step(number)
        if tracing.provider is not None and number % _STEPS_PER_FLUSH == 0:
            tracing.provider.force_flush()
    micros = (time.process_time_ns() - begun) / num_steps / 1e3
    tracing.shutdown()
    return micros


def _request(row: int, traceparent: str) -> Request:
    return Request(
        request_id=str(row),
        key=RequestKey(row),
        row=row,
        token_ids=[0],
        num_prompt_tokens=1,
        sampling=SamplingParams(max_tokens=1),
        arrival_time=time.time(),
        traceparent=traceparent,
    )


def _draw_traceparent(tracing: Tracing) -> str:
    """A random trace context. It is empty if the trace is not sampled."""
    if tracing.provider is None:
        return ""
    trace_id = secrets.randbits(128) | 1
    decision = tracing.provider.sampler.should_sample(None, trace_id, "benchmark")
    if decision.decision is not Decision.RECORD_AND_SAMPLE:
        return ""
    return f"00-{trace_id:032x}-{secrets.token_hex(8)}-01"


def _step_sampler(tracing: Tracing, num_requests: int) -> Callable[[], str]:
    """Returns a function that returns the trace context of the next step.

    The contexts are created in advance and reused in rotation. A step is traced if one of its
    requests is traced.
    """
    drawn = [
        max(_draw_traceparent(tracing) for _ in range(num_requests))
        for _ in range(2_000 if tracing.enabled else 1)
    ]
    index = 0

    def draw() -> str:
        nonlocal index
        index = (index + 1) % len(drawn)
        return drawn[index]

    return draw


async def _measure_all(endpoint: str, ratio: float, num_requests: int) -> dict[str, float]:
    num_steps = NUM_STEPS if ratio < 1 or not endpoint else _SAMPLED_STEPS
    return {
        service: await measure(service, endpoint, ratio, num_requests, num_steps)
        for service in SERVICES
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.tracing_cost")
    parser.add_argument("--endpoint", default="", help="OTLP/gRPC URL; empty: tracing is off")
    parser.add_argument("--ratio", type=float, default=1.0, help="share of what is sampled")
    parser.add_argument("--requests", type=int, default=1, help="requests in the step")
    parsed = parser.parse_args()
    found = asyncio.run(_measure_all(parsed.endpoint, parsed.ratio, parsed.requests))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
