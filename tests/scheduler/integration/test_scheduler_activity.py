"""GetActivity reports the requests, steps and blocks of a scheduler."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.telemetry import names
from tests.scheduler.fake_worker import BLOCK_SIZE, FakeWorker
from tests.scheduler.serving_replica import Gateway, Replica, sampling, serving_replica
from tests.scheduler.story import prompt

TRACE = "0af7651916cd43dd8448eb211c80319c"
RUNNING = scheduler_pb2.REQUEST_STATE_RUNNING
WAITING = scheduler_pb2.REQUEST_STATE_WAITING
BUDGET = 64


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    worker = FakeWorker(max_num_seqs=2, num_blocks=64, max_num_batched_tokens=BUDGET)
    async with serving_replica(worker) as replica:
        yield replica


async def look(
    replica: Replica, after_step: int = 0, max_cells: int = 1000
) -> scheduler_pb2.GetActivityResponse:
    request = scheduler_pb2.GetActivityRequest(after_step=after_step, max_cells=max_cells)
    answer: scheduler_pb2.GetActivityResponse = await replica.stub.GetActivity(request)
    return answer


async def hold_three(replica: Replica, gateway: Gateway, **fields: Any) -> None:
    """Adds three requests. The worker blocks in the first step of two, and the third waits."""
    async with replica.planning_together(3):
        for handle in range(3):
            await gateway.add(handle, prompt(9, 100 * handle), **fields)
    await replica.until(lambda stats: (stats.num_running, stats.num_waiting) == (2, 1))


async def test_requests_and_the_blocks_that_they_hold(replica: Replica, gateway: Gateway) -> None:
    await hold_three(replica, gateway, traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
    activity = await look(replica)
    assert [(one.request_id, one.state) for one in activity.requests] == [
        ("request-0", RUNNING),
        ("request-1", RUNNING),
        ("request-2", WAITING),
    ]
    assert [one.num_prompt_tokens for one in activity.requests] == [9, 9, 9]
    assert {one.trace_id for one in activity.requests} == {TRACE}
    assert activity.stats.num_running == 2
    states, owners = list(activity.blocks.states), list(activity.blocks.owners)
    assert len(states) == len(owners) == 63
    first, second, _ = (one.key for one in activity.requests)
    assert {owners.count(first), owners.count(second)} == {-(-9 // BLOCK_SIZE)}
    held = activity.blocks.num_held + activity.blocks.num_shared
    assert held == 63 - activity.stats.num_free_blocks
    replica.worker.going.set()
    await gateway.finish(0, 1, 2)
    await replica.until_idle()
    blocks = (await look(replica)).blocks
    assert blocks.num_held + blocks.num_shared == 0
    assert common_pb2.BLOCK_STATE_CACHED in blocks.states


async def test_a_request_that_waits_says_why(replica: Replica, gateway: Gateway) -> None:
    await hold_three(replica, gateway)
    reasons = [one.wait_reason for one in (await look(replica)).requests]
    assert reasons == [
        scheduler_pb2.WAIT_REASON_UNSPECIFIED,
        scheduler_pb2.WAIT_REASON_UNSPECIFIED,
        scheduler_pb2.WAIT_REASON_MAX_SEQS,
    ]
    replica.worker.going.set()
    await gateway.finish(0, 1, 2)


async def test_steps_are_noted_from_the_first_look_on(replica: Replica, gateway: Gateway) -> None:
    await gateway.add(0, prompt(9))
    await gateway.finish(0)
    assert list((await look(replica)).steps) == []  # steps are recorded from this call on
    before = (await replica.stats()).num_steps
    await gateway.add(1, prompt(20, 50), sampling=sampling(6))
    await gateway.finish(1)
    await replica.until_idle()
    steps = list((await look(replica)).steps)
    assert [step.step for step in steps] == sorted({step.step for step in steps})
    assert steps[0].step >= before
    assert (steps[0].num_prefill_tokens, steps[0].num_decode_tokens) == (20, 0)
    assert sum(step.num_prefill_tokens for step in steps) == 20
    assert {step.num_decode_tokens for step in steps[1:]} == {1}
    for step in steps:
        assert step.begun_unix_nanos < step.done_unix_nanos
        assert sum(step.num_tokens) == step.num_prefill_tokens + step.num_decode_tokens
        assert len(step.keys) == len(step.num_tokens) == step.num_requests
    newest = steps[-1].step
    assert list((await look(replica, after_step=newest)).steps) == []
    later = (await look(replica, after_step=newest - 1)).steps
    assert [step.step for step in later] == [newest]
    # The given step number may come from an earlier scheduler process that had run more steps.
    assert len((await look(replica, after_step=10**6)).steps) == len(steps)


async def test_without_cells_there_is_no_map(replica: Replica) -> None:
    assert not (await look(replica, max_cells=0)).HasField("blocks")
    assert len((await look(replica, max_cells=10)).blocks.states) <= 10
    with pytest.raises(grpc.aio.AioRpcError, match="max_cells"):
        await look(replica, max_cells=10**6)


async def test_while_the_pool_is_away_there_is_no_map(replica: Replica) -> None:
    await replica.pool.stop()
    activity = await look(replica)
    assert not activity.HasField("blocks")
    assert activity.stats.num_usable_blocks == 63


async def test_spans_of_requests_that_run_are_asked_for_by_their_ids(
    replica: Replica, gateway: Gateway
) -> None:
    await hold_three(replica, gateway)
    asked = [
        scheduler_pb2.RunningRequest(
            request_id=f"request-{handle}", traceparent=f"00-{TRACE}-{handle:016x}-01"
        )
        for handle in (1, 2, 77)
    ]
    answer = await replica.stub.GetRunningSpans(
        scheduler_pb2.GetRunningSpansRequest(requests=asked)
    )
    message = ExportTraceServiceRequest.FromString(answer.otlp)
    (resource,) = message.resource_spans
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    roots = [span for span in spans if span.name == names.SPAN_REQUEST]
    assert [int.from_bytes(span.parent_span_id, "big") for span in roots] == [1, 2]
    phases = {span.name for span in spans if span.parent_span_id == roots[1].span_id}
    assert phases == {names.SPAN_REQUEST_QUEUE}
    too_many = scheduler_pb2.GetRunningSpansRequest(requests=asked[:1] * 65)
    with pytest.raises(grpc.aio.AioRpcError, match="requests must have at most 64 entries"):
        await replica.stub.GetRunningSpans(too_many)
    replica.worker.going.set()
    await gateway.finish(0, 1, 2)
