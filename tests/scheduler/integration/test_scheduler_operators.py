"""The calls of operators to a scheduler: pause, resume, reset, statistics and others."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import FailedPrecondition
from services.common.process.watchdog.silence import Reading
from services.common.rpc.status import from_rpc_error
from services.scheduler.adapters.pool import pool_client
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


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with serving_replica(async_scheduling=True) as replica:
        yield replica


async def pause(replica: Replica, mode: str = "KEEP") -> None:
    value = scheduler_pb2.PauseMode.Value(f"PAUSE_MODE_{mode}")
    await replica.admin.Pause(scheduler_pb2.PauseRequest(mode=value))


async def resume(replica: Replica) -> None:
    await replica.admin.Resume(scheduler_pb2.ResumeRequest())


async def reset(replica: Replica, *, preempt_running: bool = False) -> None:
    try:
        await replica.admin.ResetPrefixCache(
            scheduler_pb2.ResetPrefixCacheRequest(preempt_running=preempt_running)
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def test_a_paused_engine_takes_requests_in_and_runs_them_later(
    replica: Replica, gateway: Gateway
) -> None:
    await gateway.add(1, prompt(9), sampling=sampling(150))
    await gateway.until_tokens(1, 2)
    await pause(replica)
    num_steps = len(replica.worker.steps)
    await gateway.add(2, prompt(9))
    await replica.until(lambda stats: stats.num_waiting == 1)
    stats = await replica.stats()
    assert stats.state == scheduler_pb2.ENGINE_STATE_PAUSED
    assert stats.num_running == 1
    assert stats.wait_reason == scheduler_pb2.WAIT_REASON_PAUSED
    assert len(replica.worker.steps) == num_steps
    await resume(replica)
    await gateway.finish(1, 2)
    assert gateway.heard[1].tokens == continuation(prompt(9), 150)
    assert gateway.heard[2].tokens == continuation(prompt(9), 8)
    await replica.until_idle()


async def test_pause_waits_for_the_step_in_flight(replica: Replica, gateway: Gateway) -> None:
    await gateway.add(1, prompt(9), sampling=sampling(150))
    await gateway.until_tokens(1, 1)
    replica.worker.going.clear()
    pausing = asyncio.create_task(pause(replica))
    done, _ = await asyncio.wait({pausing}, timeout=0.1)
    assert not done
    replica.worker.going.set()
    await pausing
    await resume(replica)
    await gateway.finish(1)
    assert gateway.heard[1].tokens == continuation(prompt(9), 150)


async def test_pause_with_abort_ends_what_runs_and_what_waits(
    replica: Replica, gateway: Gateway
) -> None:
    handles = range(12)
    for handle in handles:
        await gateway.add(handle, prompt(9, 30 * handle), sampling=sampling(150))
    await gateway.until_tokens(0, 1)
    await pause(replica, "ABORT")
    await gateway.finish(*handles)
    for handle in handles:
        finished = gateway.heard[handle].finished
        assert finished is not None
        assert finished.reason == common_pb2.FINISH_REASON_ABORT
    pool = await replica.pool.stats()
    assert pool.num_free_blocks == pool.num_usable_blocks
    await resume(replica)
    await replica.until_idle()


async def test_a_pause_that_waits_lets_what_runs_end_and_admits_nothing(
    replica: Replica, gateway: Gateway
) -> None:
    await gateway.add(1, prompt(9), sampling=sampling(150))
    await gateway.until_tokens(1, 2)
    pausing = asyncio.create_task(pause(replica, "WAIT"))
    await replica.until(lambda stats: stats.paused)
    await gateway.add(2, prompt(9, 300))
    await pausing
    stats = await replica.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 1)
    assert stats.state == scheduler_pb2.ENGINE_STATE_PAUSED
    assert stats.wait_reason == scheduler_pb2.WAIT_REASON_PAUSED
    await gateway.finish(1)
    assert gateway.heard[1].tokens == continuation(prompt(9), 150)
    assert gateway.heard[2].tokens == []
    await resume(replica)
    await gateway.finish(2)
    assert gateway.heard[2].tokens == continuation(prompt(9, 300), 8)
    await replica.until_idle()
    assert not (await replica.stats()).paused


async def test_a_pause_that_waits_ends_with_a_resume(replica: Replica, gateway: Gateway) -> None:
    await gateway.add(1, prompt(9), sampling=sampling(150))
    await gateway.until_tokens(1, 1)
    pausing = asyncio.create_task(pause(replica, "WAIT"))
    await replica.until(lambda stats: stats.paused)
    await resume(replica)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await pausing
    assert ended.value.code() is grpc.StatusCode.ABORTED
    await gateway.finish(1)
    assert gateway.heard[1].tokens == continuation(prompt(9), 150)


async def test_an_unknown_mode_of_a_pause_is_refused(replica: Replica) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await replica.admin.Pause(scheduler_pb2.PauseRequest())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not (await replica.stats()).paused


async def test_a_drained_replica_finishes_what_it_has_and_takes_nothing_new(
    replica: Replica, gateway: Gateway
) -> None:
    await gateway.add(1, prompt(9), sampling=sampling(150))
    await gateway.until_tokens(1, 2)
    answer = await replica.admin.Drain(scheduler_pb2.DrainRequest())
    assert answer.num_unfinished == 1
    await gateway.until(lambda: gateway.state is not None and gateway.state.draining)
    assert gateway.state is not None
    assert (gateway.state.ready, gateway.state.reason) == (False, "an operator drained the replica")
    await gateway.add(2, prompt(9))
    await gateway.until(lambda: gateway.heard[2].rejected is not None)
    rejected = gateway.heard[2].rejected
    assert rejected is not None
    assert (rejected.code, rejected.reason) == (grpc.StatusCode.UNAVAILABLE.value[0], "DRAINING")
    await gateway.finish(1)
    assert gateway.heard[1].tokens == continuation(prompt(9), 150)
    await replica.until_idle()
    assert (await replica.stats()).drained
    assert (await replica.admin.Drain(scheduler_pb2.DrainRequest())).num_unfinished == 0
    await replica.admin.Undrain(scheduler_pb2.UndrainRequest())
    await gateway.until(lambda: gateway.state is not None and gateway.state.ready)
    await gateway.add(3, prompt(9))
    await gateway.finish(3)
    assert not (await replica.stats()).drained


async def test_a_drained_replica_that_cannot_run_steps_is_not_merely_draining(
    replica: Replica, gateway: Gateway
) -> None:
    """Gateways move requests away from replicas that cannot run steps, not from draining ones."""
    await gateway.add(1, prompt(9), sampling=sampling(150))
    await gateway.until_tokens(1, 2)
    await replica.admin.Drain(scheduler_pb2.DrainRequest())
    await replica.pool.stop()
    await gateway.until(lambda: gateway.state is not None and gateway.state.stalled)
    assert gateway.state is not None
    assert not gateway.state.draining
    assert not gateway.state.ready
    await replica.pool.start()
    await gateway.until(lambda: gateway.state is not None and gateway.state.draining)
    await gateway.finish(1)


async def test_pause_and_resume_are_idempotent(replica: Replica, gateway: Gateway) -> None:
    await resume(replica)
    await pause(replica)
    await pause(replica)
    await resume(replica)
    await resume(replica)
    await gateway.add(1, prompt(9))
    await gateway.finish(1)


async def test_resetting_is_refused_while_blocks_are_in_use(
    replica: Replica, gateway: Gateway
) -> None:
    await gateway.add(1, prompt(9), sampling=sampling(180))
    await gateway.until_tokens(1, 1)
    with pytest.raises(FailedPrecondition) as refused:
        await reset(replica)
    assert refused.value.error_reason == "BLOCKS_IN_USE"
    await reset(replica, preempt_running=True)
    await gateway.finish(1)
    assert gateway.heard[1].tokens == continuation(prompt(9), 180)
    await replica.until_idle()


async def test_after_a_reset_nothing_is_found(replica: Replica, gateway: Gateway) -> None:
    await gateway.add(1, prompt(9))
    await gateway.finish(1)
    await replica.until_idle()
    await reset(replica)
    assert (await replica.pool.stats()).num_cached_hashes == 0
    await gateway.add(2, prompt(9))
    await gateway.finish(2)
    assert gateway.heard[2].num_cached_tokens == 0


async def test_an_idle_replica_has_told_the_pool_everything(
    replica: Replica, gateway: Gateway
) -> None:
    """The last full block is published and all blocks are freed, although no further step runs."""
    await gateway.add(1, prompt(9))
    await gateway.finish(1)
    await replica.until_idle()
    pool = await replica.pool.stats()
    assert (pool.num_requests, pool.num_cached_hashes) == (0, (9 + 8 - 1) // 4)


async def test_preempted_requests_count_once_in_the_hit_rate() -> None:
    """Hits of a preempted request on its own blocks save no computation and do not count."""
    worker = FakeWorker(num_blocks=14)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        for handle in range(5):
            await gateway.add(handle, prompt(9, 100 * handle), sampling=sampling(25))
        await gateway.finish(*range(5))
        stats, pool = await replica.stats(), await replica.pool.stats()
    assert stats.num_preemptions > 0
    assert stats.num_lost_tokens > 0
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (5 * 9, 0)
    assert (pool.num_query_tokens, pool.num_hit_tokens) == (5 * 8, 0)
    assert pool.num_reuses > 0, "the blocks themselves were reused"


async def test_statistics_count_what_was_done(replica: Replica, gateway: Gateway) -> None:
    before = await replica.stats()
    assert before.state == scheduler_pb2.ENGINE_STATE_IDLE
    assert (before.max_num_seqs, before.max_num_batched_tokens) == (8, 64)
    assert (before.num_usable_blocks, before.num_free_blocks, before.block_size) == (63, 63, 4)
    assert (before.num_sessions, before.num_steps, before.mean_step_nanos) == (1, 0, 0)
    await gateway.add(1, prompt(9))
    await gateway.finish(1)
    await gateway.add(2, prompt(9), sampling=sampling(5))
    await gateway.finish(2)
    await replica.until_idle()
    after = await replica.stats()
    assert after.incarnation == before.incarnation
    assert gateway.opened is not None
    assert after.incarnation == gateway.opened.incarnation
    assert (after.num_prompt_tokens, after.num_cached_tokens) == (18, 8)
    assert (after.num_generated_tokens, after.num_finished) == (13, 2)
    assert after.num_preemptions == 0
    assert after.num_steps >= 13
    assert after.mean_step_nanos > 0


async def test_a_small_pool_preempts_and_says_so() -> None:
    worker = FakeWorker(num_blocks=14)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        handles = range(5)
        for handle in handles:
            await gateway.add(handle, prompt(9, 100 * handle), sampling=sampling(25))
        await gateway.finish(*handles)
        for handle in handles:
            assert gateway.heard[handle].tokens == continuation(prompt(9, 100 * handle), 25)
        assert (await replica.stats()).num_preemptions > 0
        assert gateway.opened is not None
        assert gateway.opened.max_request_tokens == 52
        await replica.until_idle()


async def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    async with (
        serving_replica(FakeWorker(max_num_seqs=1), max_num_waiting=2) as replica,
        gateway_of(replica) as gateway,
    ):
        replica.worker.going.clear()
        await gateway.add(0, prompt(5))
        await replica.until(lambda stats: stats.num_running == 1)
        for handle in (1, 2, 3):
            await gateway.add(handle, prompt(5))
        await gateway.until(lambda: gateway.heard[3].rejected is not None)
        rejected = gateway.heard[3].rejected
        assert rejected is not None
        assert (rejected.code, rejected.reason) == (8, "QUEUE_FULL")
        assert rejected.retry_after_millis > 0
        replica.worker.going.set()
        await gateway.finish(0, 1, 2)


async def test_priority_is_honoured_where_it_is_the_policy() -> None:
    async with (
        serving_replica(FakeWorker(max_num_seqs=1), policy="priority") as replica,
        gateway_of(replica) as gateway,
    ):
        assert gateway.opened is not None
        assert gateway.opened.priority_scheduling
        replica.worker.going.clear()
        await gateway.add(0, prompt(5), sampling=sampling(2))
        await replica.until(lambda stats: stats.num_running == 1)
        await gateway.add(1, prompt(5, 300), priority=5, sampling=sampling(2))
        await gateway.add(2, prompt(5, 500), priority=-5, sampling=sampling(2))
        await replica.until(lambda stats: stats.num_waiting == 2)
        replica.worker.going.set()
        await gateway.finish(1, 2)
        entered = [
            request.token_ids[:4] for step in replica.worker.steps for request in step.new_requests
        ]
        firsts = [int.from_bytes(token, "little") for token in entered]
        assert firsts == [100, 500, 300]


async def test_metrics_are_read_over_http(free_port: int) -> None:
    async with (
        serving_replica(metrics_address=f"127.0.0.1:{free_port}") as replica,
        gateway_of(replica) as gateway,
        httpx.AsyncClient() as client,
    ):
        await gateway.add(1, prompt(9))
        await gateway.finish(1)
        await replica.until_idle()
        text = (await client.get(f"http://127.0.0.1:{free_port}/metrics")).text
    assert 'vllm:num_requests_running{engine="replica-0",model_name="paged"} 0.0' in text
    assert 'vllm:kv_cache_usage_perc{engine="replica-0",model_name="paged"} 0.0' in text
    (shape,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="4"' in shape
    assert 'num_gpu_blocks="64"' in shape
    assert 'cache_dtype="int8_per_token_head"' in shape
    assert "vllm:num_preemptions_total" in text
    assert "vllm:prefix_cache_queries_total{" in text, "the pool's are on the same port"


async def test_metrics_tell_why_requests_wait_and_which_were_corrupted(free_port: int) -> None:
    labels = '{engine="replica-0",model_name="paged",reason="max_seqs"}'
    theirs = '{engine="replica-0",model_name="paged",reason="capacity"}'
    async with (
        serving_replica(
            FakeWorker(max_num_seqs=1), metrics_address=f"127.0.0.1:{free_port}"
        ) as replica,
        gateway_of(replica) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port}") as client,
    ):
        await gateway.add(1, prompt(9), sampling=sampling(150))
        await gateway.until_tokens(1, 1)
        replica.worker.going.clear()
        for handle in (2, 3):
            await gateway.add(handle, prompt(9))
        await replica.until(lambda stats: stats.num_waiting == 2)
        replica.worker.going.set()
        await replica.until(lambda stats: stats.wait_reason == scheduler_pb2.WAIT_REASON_MAX_SEQS)
        replica.worker.going.clear()
        text = (await client.get("/metrics")).text
        assert f"stepwell_num_requests_waiting_by_reason{labels} 2.0" in text
        assert f"vllm:num_requests_waiting_by_reason{theirs} 2.0" in text
        replica.worker.nan_rows = frozenset({0})
        replica.worker.going.set()
        await gateway.finish(1, 2, 3)
        await replica.until_idle()
        text = (await client.get("/metrics")).text
    assert f"stepwell_num_requests_waiting_by_reason{labels} 0.0" in text
    (line,) = [line for line in text.splitlines() if f"stepwell_wait_steps_total{labels}" in line]
    assert float(line.split()[-1]) > 0
    labels = '{engine="replica-0",model_name="paged"}'
    assert f"vllm:corrupted_requests_total{labels} 3.0" in text
    assert f"stepwell_preempted_tokens_total{labels} 0.0" in text


@pytest.mark.parametrize("call", ["pause", "reset"])
async def test_a_pool_that_an_operator_s_call_finds_lost_is_opened_again(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is idle afterwards, so no step would detect the loss."""
    monkeypatch.setattr(pool_client, "TRANSACTION_FLOOR_SECONDS", 0.3)
    monkeypatch.setattr(pool_client, "IDLE_CHECK_SECONDS", 600.0)
    monkeypatch.setattr(pool_client, "watch_addresses", lambda _: Reading)
    async with serving_replica(cuttable=True) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, prompt(9), sampling=sampling(5))
        await gateway.finish(1)
        await replica.until_idle()
        generation = (await replica.pool.stats()).generation
        assert replica.link is not None
        if call == "pause":
            await gateway.add(2, prompt(9), sampling=sampling(150))
            await gateway.until_tokens(2, 1)
            replica.worker.going.clear()
        replica.link.swallow_answers()
        calling = asyncio.create_task(
            pause(replica, "ABORT") if call == "pause" else reset(replica)
        )
        await asyncio.wait({calling}, timeout=0.1)
        replica.worker.going.set()
        await asyncio.wait({calling})
        assert (calling.exception() is None) is (call == "pause")
        replica.link.cut()
        async with asyncio.timeout(SECONDS / 4):
            while (await replica.pool.stats()).generation == generation:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
