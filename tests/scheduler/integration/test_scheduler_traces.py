"""The spans of a request and of a step, across scheduler, pool and worker."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.pool.block_hash import pack_token_ids
from services.common.telemetry import names
from services.common.telemetry.tracing import configure_tracing
from tests.otlp_receiver import OtlpReceiver
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.scheduler_process import running_scheduler
from tests.scheduler.seen_spans import Seen, received, seen
from tests.scheduler.serving_replica import SECONDS, Gateway, Pool, sampling
from tests.scheduler.story import prompt

TRACE_ID = 0x1234567890ABCDEF1234567890ABCDEF
SPAN_ID = 0x1234567890ABCDEF
TRACEPARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"
SLOW_TRACE_ID = 0x51
SLOW_TRACEPARENT = f"00-{SLOW_TRACE_ID:032x}-{SPAN_ID:016x}-01"
EVERY_STEP = ["--trace-step-sample-ratio", "1"]


@dataclass(frozen=True, slots=True)
class Traces:
    spans: list[Seen]

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str, trace_id: int = TRACE_ID) -> Seen:
        (span,) = [span for span in self.named(name) if span.trace_id == trace_id]
        return span


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[["--no-async-scheduling"], ["--async-scheduling"]],
    ids=["one step in flight", "two steps in flight"],
)
async def traces(request: pytest.FixtureRequest) -> AsyncIterator[Traces]:
    collector, exporter = OtlpReceiver(), InMemorySpanExporter()
    tracing = configure_tracing("worker", "", 1.0, exporter=exporter)
    flags = ["--otlp-endpoint", collector.endpoint, *EVERY_STEP, *request.param]
    try:
        async with running_scheduler(
            *flags, worker=FakeWorker(tracing=tracing), pool=Pool(exporter)
        ) as running:
            gateway = Gateway(running.stub)
            await gateway.open()
            await gateway.add(1, prompt(9), traceparent=TRACEPARENT, request_id="traced")
            await gateway.finish(1)
            await gateway.add(2, prompt(9), sampling=sampling(2))
            await gateway.add(3, prompt(9), sampling=sampling(3), request_id="slow")
            await gateway.finish(2, 3)
            await gateway.say(
                keep=scheduler_pb2.KeepTrace(request_id="slow", traceparent=SLOW_TRACEPARENT)
            )
            # Messages are read in order: when this request is answered, the previous one was read.
            await gateway.add(4, prompt(9), sampling=sampling(1))
            await gateway.finish(4)
            await gateway.close()
            running.scheduler.process.terminate()
            assert await running.scheduler.wait() == 0
    finally:
        collector.close()
        tracing.shutdown()
    services = {one.service for one in collector.spans}
    assert services == {"stepwell-scheduler", "stepwell-engine-steps"}
    yield Traces([*received(collector), *seen(exporter.get_finished_spans())])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_is_one_trace(traces: Traces) -> None:
    request, admit = traces.one(names.SPAN_REQUEST), traces.one(names.SPAN_POOL_ADMIT)
    assert request.parent == admit.parent == SPAN_ID
    assert request.attributes[names.ATTR_REQUEST_ID] == "traced"
    assert request.attributes[names.ATTR_NUM_PROMPT_TOKENS] == 9
    assert request.attributes[names.ATTR_NUM_OUTPUT_TOKENS] == 8
    assert request.attributes[names.ATTR_FINISH_REASON] == "length"
    queue = traces.one(names.SPAN_REQUEST_QUEUE)
    prefill = traces.one(names.SPAN_REQUEST_PREFILL)
    decode = traces.one(names.SPAN_REQUEST_DECODE)
    assert [span.parent for span in (queue, prefill, decode)] == [request.span_id] * 3
    times = [request.start_unix_nanos]
    for span in (queue, prefill, decode):
        assert span.start_unix_nanos == times[-1]
        times.append(span.end_unix_nanos)
    assert times[-1] == request.end_unix_nanos
    assert traces.one(names.SPAN_PREFILL_CHUNK).parent == prefill.span_id


@pytest.mark.asyncio(loop_scope="module")
async def test_the_spans_of_a_request_that_was_not_sampled_are_there_if_its_gateway_wants_them(
    traces: Traces,
) -> None:
    request = traces.one(names.SPAN_REQUEST, SLOW_TRACE_ID)
    assert request.parent == SPAN_ID
    assert request.attributes[names.ATTR_REQUEST_ID] == "slow"
    decode = traces.one(names.SPAN_REQUEST_DECODE, SLOW_TRACE_ID)
    assert decode.parent == request.span_id


@pytest.mark.asyncio(loop_scope="module")
async def test_a_step_is_a_trace_of_its_own_linked_to_the_requests_it_serves(
    traces: Traces,
) -> None:
    steps = traces.named(names.SPAN_STEP)
    assert len({step.trace_id for step in steps}) == len(steps)
    assert all(step.parent is None for step in steps)
    linked = [step for step in steps if step.links]
    assert len(linked) == 8, "the prompt's step, and one for each further token"
    request = traces.one(names.SPAN_REQUEST)
    assert all(step.links == (request.span_id,) for step in linked)
    parts = (traces.one(names.SPAN_PREFILL_CHUNK), traces.one(names.SPAN_REQUEST_DECODE))
    back = [link for part in parts for link in part.links]
    assert sorted(back) == sorted(step.span_id for step in linked)
    first = min(linked, key=lambda step: step.attributes[names.ATTR_STEP])
    assert first.attributes[names.ATTR_NUM_SCHEDULED_TOKENS] == 9


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("client", "server"),
    [
        (names.SPAN_STEP_TRANSACT, names.SPAN_POOL_TRANSACT),
        (names.SPAN_STEP_EXECUTE, names.SPAN_WORKER_EXECUTE),
    ],
)
async def test_pool_and_worker_are_children_of_the_step_seen_from_both_sides(
    traces: Traces, client: str, server: str
) -> None:
    steps = {step.span_id: step for step in traces.named(names.SPAN_STEP)}
    calls = {call.span_id: call for call in traces.named(client)}
    served = traces.named(server)
    assert calls
    for call in calls.values():
        assert call.kind == "CLIENT"
        assert call.parent in steps
        assert call.trace_id == steps[call.parent].trace_id
    assert {span.parent for span in served} == set(calls)
    for span in served:
        assert span.kind == "SERVER"
        assert span.parent is not None
        assert span.trace_id == calls[span.parent].trace_id


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_not_sampled_leaves_no_span(traces: Traces) -> None:
    assert len(traces.named(names.SPAN_POOL_ADMIT)) == 1
    for name in (names.SPAN_REQUEST, names.SPAN_REQUEST_QUEUE, names.SPAN_REQUEST_PREFILL):
        assert {span.trace_id for span in traces.named(name)} == {TRACE_ID, SLOW_TRACE_ID}


@pytest.mark.asyncio(loop_scope="module")
async def test_the_gateway_is_told_where_the_time_of_each_request_went() -> None:
    async with running_scheduler() as running:
        gateway = Gateway(running.stub)
        await gateway.open()
        sent = time.time_ns()
        await gateway.add(1, prompt(9))
        await gateway.finish(1)
        took = time.time_ns() - sent
        await gateway.close()
    finished = gateway.heard[1].finished
    assert finished is not None
    times = finished.times
    assert times.prefill_nanos > 0
    assert times.decode_nanos > 0
    assert times.queue_nanos + times.prefill_nanos + times.decode_nanos <= took
    assert times.interrupted_nanos == 0
    assert sent <= times.queued_unix_nanos <= sent + took


@pytest.mark.asyncio(loop_scope="module")
async def test_what_comes_from_a_lost_scheduler_has_waited_since_it_came() -> None:
    """The time on the lost scheduler does not count as time in this scheduler's queue."""
    collector = OtlpReceiver()
    try:
        async with running_scheduler("--otlp-endpoint", collector.endpoint) as running:
            gateway = Gateway(running.stub)
            await gateway.open()
            sent = time.time_ns()
            await gateway.add(
                1,
                prompt(9),
                traceparent=TRACEPARENT,
                arrival_unix_nanos=sent - 60 * 10**9,
                output_token_ids=pack_token_ids([5, 6]),
            )
            await gateway.finish(1)
            await gateway.close()
            running.scheduler.process.terminate()
            assert await running.scheduler.wait() == 0
    finally:
        collector.close()
    spans = Traces(received(collector))
    queue, prefill = spans.one(names.SPAN_REQUEST_QUEUE), spans.one(names.SPAN_REQUEST_PREFILL)
    assert sent <= queue.start_unix_nanos <= queue.end_unix_nanos
    assert prefill.start_unix_nanos >= queue.start_unix_nanos
    assert queue.attributes[names.ATTR_NUM_OUTPUT_TOKENS] == 2


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("answers", [True, False], ids=["answers late", "never answers"])
async def test_a_step_in_flight_at_the_end_leaves_a_whole_trace(answers: bool) -> None:
    collector, worker = OtlpReceiver(), FakeWorker()
    flags = ["--otlp-endpoint", collector.endpoint, *EVERY_STEP, "--drain-seconds", "0.2"]
    try:
        async with running_scheduler(*flags, worker=worker) as running:
            gateway = Gateway(running.stub)
            await gateway.open()
            worker.going.clear()
            await gateway.add(1, prompt(9))
            async with asyncio.timeout(SECONDS):
                while len(worker.steps) < 2:  # noqa: ASYNC110 - the worker is this process's own
                    await asyncio.sleep(0.01)
            running.scheduler.process.terminate()
            await gateway.until_ended()
            if answers:
                worker.going.set()
            assert await running.scheduler.wait() == 0
    finally:
        collector.close()
    spans = Traces(received(collector))
    assert spans.named(names.SPAN_STEP_EXECUTE)
    known = {span.span_id for span in spans.spans}
    assert all(span.parent in known for span in spans.spans if span.parent is not None)
