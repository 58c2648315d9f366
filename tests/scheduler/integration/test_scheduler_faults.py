"""A failed pool or worker costs computation and time, but no token is lost, repeated or changed."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import FailedPrecondition
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

PROMPTS = {handle: prompt(6 + handle, 150 * handle) for handle in range(4)}
MANY = 150


@pytest.fixture(params=[False, True], ids=["one step in flight", "two steps in flight"])
async def replica(request: pytest.FixtureRequest) -> AsyncIterator[Replica]:
    worker = FakeWorker(num_blocks=200)
    async with serving_replica(
        worker, async_scheduling=request.param, step_timeout_seconds=1.0, pool_timeout_seconds=1.0
    ) as replica:
        yield replica


@pytest.fixture(params=[False, True], ids=["one step in flight", "two steps in flight"])
async def patient(request: pytest.FixtureRequest) -> AsyncIterator[Replica]:
    """A replica that waits long for its pool, because tests break its connection to the pool."""
    worker = FakeWorker(num_blocks=200)
    async with serving_replica(
        worker, cuttable=True, async_scheduling=request.param, pool_timeout_seconds=15.0
    ) as replica:
        yield replica


async def ask(gateway: Gateway) -> None:
    for handle, token_ids in PROMPTS.items():
        await gateway.add(handle, token_ids, sampling=sampling(MANY))
    await gateway.until_tokens(3, 3)


async def expect_every_token(gateway: Gateway) -> None:
    await gateway.finish(*PROMPTS)
    for handle, token_ids in PROMPTS.items():
        assert gateway.heard[handle].tokens == continuation(token_ids, MANY)


async def until_recovering(replica: Replica) -> None:
    await replica.until(lambda stats: stats.state == scheduler_pb2.ENGINE_STATE_RECOVERING)
    assert (await replica.stats()).state_reason


async def test_a_cut_connection_to_the_pool_costs_nothing(patient: Replica) -> None:
    async with gateway_of(patient) as gateway:
        await ask(gateway)
        before = await patient.pool.stats()
        for tokens in (10, 20, 30):
            await gateway.until_tokens(3, tokens)
            patient.pool_link.cut()
        await expect_every_token(gateway)
        await patient.until_idle()
    after = await patient.pool.stats()
    assert after.generation == before.generation, "the transaction was sent again"
    assert patient.pool_link.num_connections >= 2
    assert (await patient.stats()).num_preemptions == 0


async def test_a_transaction_whose_answer_was_lost_is_applied_once(patient: Replica) -> None:
    async with gateway_of(patient) as gateway:
        await ask(gateway)
        before = await patient.pool.stats()
        patient.pool_link.swallow_answers()
        await asyncio.wait_for(patient.pool_link.has_swallowed.wait(), SECONDS)
        patient.pool_link.cut()
        await expect_every_token(gateway)
        await patient.until_idle()
    after = await patient.pool.stats()
    assert after.generation == before.generation
    assert (await patient.stats()).num_preemptions == 0


async def test_a_pool_that_comes_back_empty_is_a_new_generation(
    replica: Replica, gateway: Gateway
) -> None:
    await ask(gateway)
    await replica.pool.stop()
    await until_recovering(replica)
    await gateway.add(9, prompt(5), sampling=sampling(3))
    await replica.until(lambda stats: stats.num_waiting == 5)
    await replica.pool.start()
    await expect_every_token(gateway)
    await gateway.finish(9)
    assert gateway.heard[9].tokens == continuation(prompt(5), 3)
    await replica.until_idle()


async def test_a_pool_that_restarts_at_once_is_noticed_by_its_generation(
    replica: Replica, gateway: Gateway
) -> None:
    await ask(gateway)
    await replica.pool.stop()
    await replica.pool.start()
    await expect_every_token(gateway)
    assert (await replica.stats()).num_preemptions > 0
    assert "the kvpool has restarted without its blocks" in {one.reason for one in gateway.states}
    await replica.until_idle()


async def test_a_worker_that_comes_back_gets_everything_again(
    replica: Replica, gateway: Gateway
) -> None:
    await ask(gateway)
    before = await replica.pool.stats()
    await replica.worker.stop()
    await until_recovering(replica)
    await replica.worker.start()
    await expect_every_token(gateway)
    await replica.until_idle()
    assert (await replica.pool.stats()).generation > before.generation


async def test_a_worker_that_hangs_is_given_up_on(replica: Replica, gateway: Gateway) -> None:
    await ask(gateway)
    replica.worker.going.clear()
    await replica.until(lambda stats: stats.num_preemptions > 0)
    replica.worker.going.set()
    await expect_every_token(gateway)
    await replica.until_idle()


async def test_a_request_can_be_aborted_while_the_worker_is_away(
    replica: Replica, gateway: Gateway
) -> None:
    await ask(gateway)
    await replica.worker.stop()
    await until_recovering(replica)
    await gateway.abort(0)
    await replica.worker.start()
    await gateway.finish(*PROMPTS)
    for handle in (1, 2, 3):
        assert gateway.heard[handle].tokens == continuation(PROMPTS[handle], MANY)
    assert gateway.heard[0].tokens == continuation(PROMPTS[0], len(gateway.heard[0].tokens))
    await replica.until_idle()


async def test_a_lost_rank_takes_the_whole_group_along() -> None:
    ranks = [FakeWorker(rank=rank, world_size=2, num_blocks=64 - rank) for rank in range(2)]
    async with serving_replica(*ranks) as replica, gateway_of(replica) as gateway:
        assert (await replica.stats()).num_usable_blocks == 62, "the least of all ranks"
        await gateway.add(1, prompt(9), sampling=sampling(MANY))
        await gateway.until_tokens(1, 5)
        await ranks[1].stop()
        await until_recovering(replica)
        await ranks[1].start()
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(prompt(9), MANY)
        await replica.until_idle()
    first, second = ([step for step in rank.steps if step.generation == 1] for rank in ranks)
    assert second == first[: len(second)], "the same bytes to every rank"


async def test_ranks_are_told_of_a_generation_before_there_is_work() -> None:
    ranks = [FakeWorker(rank=rank, world_size=2) for rank in range(2)]
    async with serving_replica(*ranks) as replica:
        await replica.until(lambda _: all(rank.steps for rank in ranks))
        generation = (await replica.pool.stats()).generation
    (opening,) = ranks[0].steps
    assert (opening.generation, opening.timeout_millis) == (generation, 120_000)
    assert (opening.rows, opening.owner.name) == (b"", "replica-0")
    assert ranks[1].steps == [opening]


async def test_a_generation_is_greater_than_what_any_rank_has_seen() -> None:
    """Steps have the generation (number) of the batch to which they belong. If an earlier scheduler
    had used the same number, a rank that still runs one of its steps would never synchronize with
    the other ranks.
    """
    ranks = [FakeWorker(rank=rank, world_size=2) for rank in range(2)]
    ranks[1].description.seen_generation = 2**60
    async with serving_replica(*ranks) as replica:
        assert (await replica.pool.stats()).generation == 2**60 + 1
        ranks[1].description.seen_generation = 0
        await replica.pool.stop()
        await replica.pool.start()
        await replica.until(lambda _: len(ranks[0].steps) == 2)
    assert [step.generation for step in ranks[0].steps] == [2**60 + 1, 2**60 + 2]


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_lost_pipeline_stage_takes_the_others_along(lost: int) -> None:
    stages = [FakeWorker(rank=rank, world_size=2, pipeline_parallel_size=2) for rank in range(2)]
    async with serving_replica(*stages) as replica, gateway_of(replica) as gateway:
        for handle in (1, 2):
            await gateway.add(handle, prompt(9 + handle), sampling=sampling(MANY))
            await gateway.until_tokens(handle, 5)
        await stages[lost].stop()
        await until_recovering(replica)
        await stages[lost].start()
        for handle in (1, 2):
            await gateway.finish(handle)
            assert gateway.heard[handle].tokens == continuation(prompt(9 + handle), MANY)
        await replica.until_idle()


async def test_ranks_out_of_order_end_the_scheduler_with_a_sentence() -> None:
    ranks = [FakeWorker(rank=1 - index, world_size=2) for index in range(2)]
    with pytest.raises(FailedPrecondition, match="--workers must list all ranks, in order"):
        async with serving_replica(*ranks):
            pass


async def test_ranks_of_different_models_end_the_scheduler_with_a_sentence() -> None:
    ranks = [
        FakeWorker(rank=0, world_size=2),
        FakeWorker(rank=1, world_size=2, fingerprint=b"g" * 32),
    ]
    with pytest.raises(FailedPrecondition, match="another model"):
        async with serving_replica(*ranks):
            pass


async def test_without_chunks_the_step_must_hold_a_whole_sequence() -> None:
    with pytest.raises(FailedPrecondition, match="without chunked prefill"):
        async with serving_replica(enable_chunked_prefill=False):
            pass
    worker = FakeWorker(max_num_batched_tokens=200, max_model_len=200)
    async with (
        serving_replica(worker, enable_chunked_prefill=False) as replica,
        gateway_of(replica) as gateway,
    ):
        await gateway.add(1, prompt(150))
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(prompt(150), 8)
