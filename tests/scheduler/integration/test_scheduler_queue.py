"""The limit on the time in the queue: requests are refused at arrival, or end before their first
step. Also the reports of queue and load that gateways receive.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import ResourceExhausted
from services.common.pool.block_hash import pack_token_ids
from services.common.rpc.status import STATUS_OF
from services.scheduler.adapters.gateways.queue_watch import QueueWatch
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import (
    SECONDS,
    Gateway,
    Replica,
    gateway_of,
    sampling,
    serving_replica,
)
from tests.scheduler.story import prompt

RESOURCE_EXHAUSTED = STATUS_OF[ResourceExhausted].value[0]
QUEUE_TIMEOUT = common_pb2.FINISH_REASON_QUEUE_TIMEOUT


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    """A replica that runs two requests at a time. Other requests may wait for half a second."""
    worker = FakeWorker(max_num_seqs=2, num_blocks=200)
    async with serving_replica(worker, max_queue_seconds=0.5) as replica:
        yield replica


async def hold_two(replica: Replica, gateway: Gateway) -> None:
    """Adds two requests. The worker blocks in their first step, so that further requests wait."""
    async with replica.planning_together(2):
        for handle in range(2):
            await gateway.add(handle, prompt(5, 100 * handle), timeout_millis=60_000)
    await replica.until(lambda stats: stats.num_running == 2)


def reason_of(gateway: Gateway, handle: int) -> int | None:
    finished = gateway.heard[handle].finished
    return finished.reason if finished is not None else None


async def test_requests_that_wait_too_long_end_and_those_that_run_do_not(
    replica: Replica, gateway: Gateway
) -> None:
    await hold_two(replica, gateway)
    for handle in (2, 3):
        await gateway.add(handle, prompt(5, 100 * handle))
    await gateway.finish(2, 3)
    assert [reason_of(gateway, handle) for handle in range(4)] == [None, None, *[QUEUE_TIMEOUT] * 2]
    finished = gateway.heard[2].finished
    assert finished is not None
    assert finished.message == "the request waited too long for its first step"
    replica.worker.going.set()
    await gateway.finish(0, 1)
    for handle in range(2):
        assert gateway.heard[handle].tokens == continuation(prompt(5, 100 * handle), 8)
    await replica.until_idle()


async def test_the_time_of_a_request_ends_also_while_the_worker_is_away(
    replica: Replica, gateway: Gateway
) -> None:
    await replica.worker.stop()
    await replica.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_RECOVERING)
    await gateway.add(1, prompt(5))
    await gateway.finish(1)
    assert reason_of(gateway, 1) == QUEUE_TIMEOUT


async def test_a_request_that_came_with_output_is_bound_by_its_client_alone(
    replica: Replica, gateway: Gateway
) -> None:
    said = continuation(prompt(5), 8)
    await hold_two(replica, gateway)
    await gateway.add(2, prompt(5, 200))
    await gateway.add(3, prompt(5), output_token_ids=pack_token_ids(said[:2]))
    await gateway.add(4, prompt(5), output_token_ids=pack_token_ids(said[:2]), timeout_millis=300)
    await gateway.finish(2, 4)
    assert reason_of(gateway, 4) == QUEUE_TIMEOUT
    replica.worker.going.set()
    await gateway.finish(0, 1, 3)
    assert gateway.heard[3].tokens == said[2:]


async def test_under_load_what_would_wait_too_long_is_refused_at_once(
    replica: Replica, gateway: Gateway
) -> None:
    handles = iter(range(10_000))
    added: list[int] = []
    refused: scheduler_pb2.Rejection | None = None
    async with asyncio.timeout(SECONDS):
        while refused is None:
            for _ in range(50):
                handle = next(handles)
                added.append(handle)
                await gateway.add(handle, prompt(9, handle), sampling=sampling(40))
            await asyncio.sleep(0.05)
            refused = next(
                (heard.rejected for heard in gateway.heard.values() if heard.rejected), None
            )
    assert (refused.code, refused.reason) == (RESOURCE_EXHAUSTED, "QUEUE_TOO_LONG")
    assert refused.retry_after_millis >= 1000
    assert refused.message.endswith("but may wait only 0.5 s")
    await gateway.finish(*added)
    complete = [heard for heard in gateway.heard.values() if len(heard.tokens) == 40]
    assert complete, "and others are served"
    await replica.until_idle()
    patient = next(handles)
    await gateway.add(patient, prompt(9), timeout_millis=1)
    await gateway.finish(patient)
    assert len(gateway.heard[patient].tokens) == 8, "where no request waits none is refused"


async def test_gateways_hear_how_long_the_queue_is_before_any_request_has_ended() -> None:
    worker = FakeWorker(max_num_seqs=2, num_blocks=2000, max_model_len=3000)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        for handle in range(8):
            await gateway.add(handle, prompt(9, handle), sampling=sampling(2900))
        await gateway.until(lambda: any(queue.seconds_per_request for queue in gateway.queues))
        assert not any(heard.finished for heard in gateway.heard.values())
        queue = gateway.queues[-1]
        assert (queue.num_waiting, queue.max_num_waiting, queue.max_queue_seconds) == (6, 1024, 60)
        assert queue.service_seconds > queue.seconds_per_request, "two run at a time"
        await gateway.abort(*range(8))
        await gateway.until(lambda: gateway.queues[-1].num_waiting == 0)


async def test_gateways_hear_how_many_have_places_and_what_a_prompt_takes() -> None:
    """8 requests may run. The pool has blocks for only 5, because each needs 8 blocks."""
    worker = FakeWorker(num_blocks=5 * 8 + 1)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        for handle in range(10):
            await gateway.add(handle, prompt(60, handle), sampling=sampling(1))
            await gateway.finish(handle)
        await gateway.until(lambda: any(queue.seconds_per_prompt for queue in gateway.queues))
        assert gateway.queues[-1].num_free == 8
        replica.worker.going.clear()
        for handle in range(10, 12):
            await gateway.add(handle, prompt(30, handle))
        await gateway.until(
            lambda: any((one.num_running, one.num_free) == (2, 3) for one in gateway.queues)
        )
        replica.worker.going.set()
        await gateway.finish(10, 11)


async def test_each_gateway_hears_how_many_run_and_how_many_are_not_its_own(
    replica: Replica, gateway: Gateway
) -> None:
    """Two requests run at a time. When all have ended, both gateways receive a load of 0."""
    assert gateway.opened is not None
    assert gateway.opened.max_num_seqs == 2
    async with gateway_of(replica) as other:
        replica.worker.going.clear()
        await gateway.add(1, prompt(5))
        for handle in range(2):
            await other.add(handle, prompt(5, 100 * handle), timeout_millis=60_000)
        for heard, num_others in ((gateway, 2), (other, 1)):
            await heard.until(
                lambda heard=heard, num=num_others: any(
                    (load.num_requests, load.num_other_requests) == (3, num) for load in heard.loads
                )
            )
            await heard.until(
                lambda heard=heard: any(
                    (queue.num_running, queue.num_waiting) == (2, 1) for queue in heard.queues
                )
            )
        replica.worker.going.set()
        await gateway.finish(1)
        for heard in (gateway, other):
            await heard.until(lambda heard=heard: heard.loads[-1].num_requests == 0)
            assert heard.loads[-1].num_other_requests == 0
            await heard.until(lambda heard=heard: heard.queues[-1].num_running == 0)


async def test_loads_come_with_the_steps_that_change_them(
    replica: Replica, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Periodic reports of the load are off. A step that only decodes does not change the load."""
    monkeypatch.setattr(QueueWatch, "_look", lambda _: None)
    async with gateway_of(replica) as other:
        await gateway.add(1, prompt(9), sampling=sampling(60))
        await other.until(lambda: bool(other.loads))
        await gateway.finish(1)
        await other.until(lambda: other.loads[-1].num_requests == 0)
        seen = [(load.num_requests, load.num_other_requests) for load in other.loads]
        assert seen == [(1, 1), (0, 0)], "once with the first step, once with the last"
        seen = [(load.num_requests, load.num_other_requests) for load in gateway.loads]
        assert seen == [(1, 0), (0, 0)]
        assert {load.num_uncomputed_tokens for load in gateway.loads} == {0}


async def test_a_long_prompt_weighs_less_with_each_of_its_chunks(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueueWatch, "_look", lambda _: None)
    await gateway.add(1, prompt(150), sampling=sampling(2))
    await gateway.finish(1)
    await gateway.until(lambda: gateway.loads[-1].num_requests == 0)
    left = [load.num_uncomputed_tokens for load in gateway.loads]
    assert left == sorted(left, reverse=True)
    assert left[0] == 150 - 64, "after the first step of 64 tokens"
    assert left[-1] == 0


@pytest.mark.parametrize(("max_num_seqs", "is_blocked"), [(4, True), (1, False)])
async def test_gateways_hear_whether_blocks_are_what_is_missing(
    max_num_seqs: int, is_blocked: bool
) -> None:
    """The pool has blocks for one of two prompts. The other waits for blocks or a batch row."""
    worker = FakeWorker(max_num_seqs=max_num_seqs, num_blocks=40)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        replica.worker.going.clear()
        for handle in range(2):
            await gateway.add(handle, prompt(100, 100 * handle))
        await gateway.until(
            lambda: any((one.num_running, one.num_waiting) == (1, 1) for one in gateway.queues)
        )
        await replica.until(lambda _: bool(replica.worker.steps))  # the worker blocks a step
        replica.worker.going.set()
        replica.worker.going.clear()  # this step ends, and the next step is planned and blocked
        if is_blocked:
            await gateway.until(lambda: any(one.is_blocked for one in gateway.queues))
        replica.worker.going.set()
        await gateway.finish(0, 1)
        await gateway.until(lambda: gateway.queues[-1].num_running == 0)
        assert any(one.is_blocked for one in gateway.queues) == is_blocked
        assert not gateway.queues[-1].is_blocked
