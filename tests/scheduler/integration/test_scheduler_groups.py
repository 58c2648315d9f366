"""KV-cache groups end to end: the scheduler opens the pool with its worker's groups."""

import pytest
from stepwell.common.v1 import common_pb2

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.pool.block_hash import unpack_token_ids
from tests.scheduler.fake_worker import BLOCK_SIZE, FULL, FakeWorker
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import Gateway, Replica, gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt

WINDOW = common_pb2.KVCacheGroup(
    attention_type=common_pb2.ATTENTION_TYPE_SLIDING_WINDOW,
    block_size=BLOCK_SIZE,
    num_layers=4,
    window=6,
)
STATE = common_pb2.KVCacheGroup(
    attention_type=common_pb2.ATTENTION_TYPE_STATE_SPACE,
    block_size=BLOCK_SIZE,
    num_layers=6,
    mamba_cache_mode=common_pb2.MAMBA_CACHE_MODE_ALIGN,
)


async def serve_under_preemption(replica: Replica, gateway: Gateway) -> None:
    prompts = {number: prompt(13, 100 * (number % 3)) for number in range(8)}
    for number, token_ids in prompts.items():
        await gateway.add(number, token_ids, sampling=sampling(25))
    await gateway.finish(*prompts)
    for number, token_ids in prompts.items():
        assert gateway.heard[number].tokens == continuation(token_ids, 25), number
    assert (await replica.stats()).num_preemptions > 0


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one step", "two steps in flight"])
async def test_a_hybrid_model_is_served_under_preemption_and_hits(async_scheduling: bool) -> None:
    worker = FakeWorker(num_blocks=36, max_num_batched_tokens=16, groups=[FULL, WINDOW, STATE])
    async with (
        serving_replica(worker, async_scheduling=async_scheduling) as replica,
        gateway_of(replica) as gateway,
    ):
        assert gateway.opened is not None
        # Of the 35 blocks, a request needs at most seven for the window and two for states. With
        # two steps in flight it needs eleven and three.
        num_full_blocks = 21 if async_scheduling else 26
        assert gateway.opened.max_request_tokens == num_full_blocks * BLOCK_SIZE
        await serve_under_preemption(replica, gateway)
        for number in (8, 9):
            await gateway.add(number, prompt(13, 900))
            await gateway.finish(number)
        # A state was stored at the block boundary after 12 tokens. The last token is recomputed.
        assert gateway.heard[9].num_cached_tokens == 12
        assert any(unpack_token_ids(step.block_ids_to_zero) for step in worker.steps)
        await replica.until_idle()
        pool = await replica.pool.stats()
        assert len(pool.num_common_prefix_blocks) == 3


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one step", "two steps in flight"])
@pytest.mark.parametrize("order", [1, -1], ids=["small blocks first", "large blocks first"])
async def test_blocks_of_several_sizes_are_served_under_preemption_and_hits(
    async_scheduling: bool, order: int
) -> None:
    wide = common_pb2.KVCacheGroup(
        attention_type=common_pb2.ATTENTION_TYPE_FULL, block_size=2 * BLOCK_SIZE, num_layers=4
    )
    worker = FakeWorker(num_blocks=24, max_num_batched_tokens=16, groups=[WINDOW, wide][::order])
    async with (
        serving_replica(worker, async_scheduling=async_scheduling) as replica,
        gateway_of(replica) as gateway,
    ):
        assert gateway.opened is not None
        assert gateway.opened.block_size == gateway.opened.hash_block_size == BLOCK_SIZE
        await serve_under_preemption(replica, gateway)
        for number in (8, 9):
            await gateway.add(number, prompt(15, 900))
            await gateway.finish(number)
        # 15 tokens fill three small blocks, and one large block of eight tokens.
        assert gateway.heard[9].num_cached_tokens == 8


async def test_a_draft_head_has_the_last_block_of_a_hit_computed_again() -> None:
    worker = FakeWorker(drop_last_hit_block=True)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        for number in (1, 2):
            await gateway.add(number, prompt(13), sampling=sampling(4))
            await gateway.finish(number)
        assert gateway.heard[2].num_cached_tokens == 8
        assert gateway.heard[2].tokens == continuation(prompt(13), 4)


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([], "worker 0 describes no KV-cache group"),
        (
            [common_pb2.KVCacheGroup(block_size=4)],
            "with an attention type that this scheduler does not know",
        ),
    ],
)
async def test_groups_that_make_no_sense_end_the_start_with_a_sentence(
    groups: list[common_pb2.KVCacheGroup], sentence: str
) -> None:
    with pytest.raises(FailedPrecondition, match=sentence):
        async with serving_replica(FakeWorker(groups=groups)):
            pass


async def test_ranks_must_divide_their_layers_alike() -> None:
    ranks = [
        FakeWorker(rank=rank, world_size=2, groups=groups)
        for rank, groups in enumerate(([FULL, WINDOW], [FULL]))
    ]
    with pytest.raises(
        FailedPrecondition, match="worker 1 divides its layers into other KV-cache groups"
    ):
        async with serving_replica(*ranks):
            pass


async def test_what_the_pool_cannot_hold_ends_the_start_with_the_pool_s_sentence() -> None:
    chunk = common_pb2.KVCacheGroup(
        attention_type=common_pb2.ATTENTION_TYPE_CHUNKED_LOCAL, block_size=BLOCK_SIZE, window=6
    )
    with pytest.raises(
        InvalidArgument, match="chunks of 6 tokens are not a whole number of blocks of 4"
    ):
        async with serving_replica(FakeWorker(groups=[chunk])):
            pass


async def test_a_pool_that_holds_no_request_in_all_groups_ends_the_start_with_a_sentence() -> None:
    with pytest.raises(FailedPrecondition, match=r"3 blocks, .* in each of 3 KV-cache groups"):
        async with serving_replica(FakeWorker(num_blocks=3, groups=[FULL, WINDOW, STATE])):
            pass


OVERWRITTEN = common_pb2.KVCacheGroup(
    attention_type=common_pb2.ATTENTION_TYPE_STATE_SPACE,
    block_size=200,
    mamba_cache_mode=common_pb2.MAMBA_CACHE_MODE_NONE,
)


async def test_states_that_are_overwritten_are_not_served_with_prefix_caching() -> None:
    with pytest.raises(FailedPrecondition, match="mamba_cache_mode align, or disable prefix"):
        async with serving_replica(FakeWorker(groups=[FULL, OVERWRITTEN])):
            pass


async def test_a_unit_that_does_not_divide_blocks_is_refused() -> None:
    worker = FakeWorker(groups=[FULL, STATE])
    with pytest.raises(InvalidArgument, match="prefix_match_unit is 3, but not all block sizes"):
        async with serving_replica(worker, prefix_match_unit=3):
            pass


async def test_a_unit_is_refused_where_nothing_is_found_inside_a_block() -> None:
    with pytest.raises(FailedPrecondition, match="prefix_match_unit is for models with recurrent"):
        async with serving_replica(FakeWorker(groups=[FULL, WINDOW]), prefix_match_unit=2):
            pass


async def test_a_unit_inside_blocks_is_refused_where_blocks_are_offloaded() -> None:
    worker = FakeWorker(groups=[FULL, STATE])
    worker.description.num_tier_blocks = 8
    with pytest.raises(FailedPrecondition, match="found by the hash at their end"):
        async with serving_replica(worker, prefix_match_unit=2):
            pass


async def test_states_are_not_served_without_chunks() -> None:
    with pytest.raises(FailedPrecondition, match="enable chunked prefill"):
        async with serving_replica(FakeWorker(groups=[STATE]), enable_chunked_prefill=False):
            pass
