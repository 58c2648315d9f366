"""KV blocks are offloaded to a tier of host memory: which are stored, and which are loaded.

A block has four tokens.
"""

from dataclasses import replace

import pytest

from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_transfer import (
    ConnectorLoad,
    KVLoadFailurePolicy,
    KVRole,
    KVTransferResults,
)
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput, WaitReason
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request
from services.scheduler.options.transfers.core.offloading_connector import OffloadingConnector
from services.simulation.inprocess_pool import InProcessPool
from tests.scenarios.connector import connected

CONFIG = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    block_size=4,
    num_blocks=40,
    kv_role=KVRole.BOTH,
    kv_load_failure_policy=KVLoadFailurePolicy.RECOMPUTE,
)
WINDOWED = replace(
    CONFIG,
    groups=(
        KVCacheGroup(AttentionType.FULL, 4),
        KVCacheGroup(AttentionType.SLIDING_WINDOW, 4, window=5),
    ),
)
HYBRID = replace(
    CONFIG,
    groups=(
        KVCacheGroup(AttentionType.FULL, 4),
        KVCacheGroup(AttentionType.STATE_SPACE, 4, mamba_cache_mode=MambaCacheMode.ALIGN),
    ),
)
PROMPT = list(range(100, 113))
"""A prompt that fills three blocks and has one more token."""


class Story:
    """A scheduler with a KV connector. Its workers are simulated, and sample the token 7 each time.
    Loads end when the test calls `finish_loads`.
    """

    def __init__(self, config: SchedulerConfig = CONFIG, num_tier_blocks: int = 20) -> None:
        self.connector = OffloadingConnector(config, num_tier_blocks)
        self.pool = InProcessPool(config)
        self.scheduler = Scheduler(config, self.pool, connected(self.connector))
        self.loading: list[RequestKey] = []
        self.invalid: list[BlockId] = []
        self.ended: list[RequestKey] = []
        self._num_requests = 0

    def add(self, prompt: list[int] = PROMPT, max_tokens: int = 2) -> Request:
        self._num_requests += 1
        request = Request(
            request_id=f"r{self._num_requests}",
            key=RequestKey(self._num_requests),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        self.scheduler.add(request)
        return request

    async def step_with_a_load(self) -> ConnectorLoad:
        plan = await self.step()
        assert plan.kv_connector_metadata is not None
        (load,) = plan.kv_connector_metadata.loads
        return load

    def finish_loads(self, *invalid: BlockId) -> None:
        """Ends all loads. The next step's output reports them, and blocks `invalid` as failed."""
        self.ended, self.loading, self.invalid = self.loading, [], list(invalid)

    async def step(self) -> SchedulerOutput:
        plan = await self.scheduler.schedule()
        metadata = plan.kv_connector_metadata
        self.loading += [load.request for load in metadata.loads] if metadata else []
        results = KVTransferResults(finished_recving=self.ended, invalid_block_ids=self.invalid)
        self.ended, self.invalid = [], []
        tokens = [
            [7] if start + count == request.num_tokens else []
            for request, start, count in zip(
                plan.requests, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
            )
        ]
        self.scheduler.update_from_output(plan, ModelRunnerOutput(tokens, kv_transfers=results))
        await self.scheduler.flush()
        self.connector.index.check()
        self.pool.core.check()
        return plan

    async def run(self) -> None:
        """Runs steps until nothing is left to do. A load ends in the step after its own."""
        while self.scheduler.has_work:
            self.finish_loads()
            await self.step()

    async def stored(self) -> "Story":
        """Runs a request with `PROMPT` and empties the prefix cache. The prompt's three blocks are
        then only in the tier.
        """
        self.add()
        await self.run()
        assert await self.scheduler.reset_prefix_cache()
        return self


def stores(plan: SchedulerOutput) -> list[tuple[int, int]]:
    metadata = plan.kv_connector_metadata
    if metadata is None:
        return []
    return [(transfer.block, transfer.tier_block) for transfer in metadata.stores]


async def test_the_step_after_the_one_that_fills_blocks_stores_them() -> None:
    story = Story()
    story.add()
    assert stores(await story.step()) == []
    assert stores(await story.step()) == [(1, 2), (2, 1), (3, 0)]
    assert story.connector.stats.num_stored_blocks == 3


async def test_what_is_in_the_tier_is_not_stored_again() -> None:
    story = Story()
    story.add()
    await story.run()
    story.add()
    plans = [await story.step() for _ in range(3)]
    assert [stores(plan) for plan in plans] == [[], [], []]


async def test_a_request_that_ends_stores_its_last_blocks_with_a_step_of_nothing() -> None:
    story = Story()
    story.add(PROMPT[:4], max_tokens=1)
    await story.step()
    plan = await story.step()
    assert (plan.requests, stores(plan)) == ([], [(1, 0)])


async def test_a_load_takes_blocks_and_waits_and_then_one_token_is_left_to_compute() -> None:
    story = await Story().stored()
    request = story.add()
    plan = await story.step()
    assert plan.requests == []
    (load,) = plan.kv_connector_metadata.loads if plan.kv_connector_metadata else ()
    assert len(load.blocks) == 3
    assert plan.is_sent
    again = await story.step()
    assert (again.requests, again.passed_over) == ([], {request: WaitReason.REMOTE_KV})
    story.finish_loads()
    await story.step()
    plan = await story.step()
    assert (plan.requests, plan.num_computed_tokens) == ([request], [12])
    assert (request.num_cached_tokens, request.num_external_tokens) == (12, 12)
    stats = story.connector.stats
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (13 + 13, 12)


async def test_what_the_cache_has_is_not_loaded() -> None:
    story = await Story().stored()
    story.add(PROMPT[:9])
    await story.run()
    request = story.add()
    load = await story.step_with_a_load()
    assert len(load.blocks) == 1
    await story.run()
    assert (request.num_cached_tokens, request.num_external_tokens) == (12, 4)


async def test_a_damaged_block_is_computed_again_and_stored_anew() -> None:
    story = await Story().stored()
    request = story.add()
    load = await story.step_with_a_load()
    story.finish_loads(load.blocks[1].block)
    await story.step()
    assert len(story.connector.index) == 2
    plan = await story.step()
    assert (plan.requests, plan.num_computed_tokens) == ([request], [4])
    assert request.num_external_tokens == 4
    await story.run()
    assert len(story.connector.index) == 3
    assert story.connector.stats.num_invalid_blocks == 1


async def test_with_the_first_block_damaged_nothing_of_the_load_is_used() -> None:
    story = await Story().stored()
    request = story.add()
    load = await story.step_with_a_load()
    story.finish_loads(load.blocks[0].block)
    await story.step()
    plan = await story.step()
    assert (plan.requests, plan.num_computed_tokens) == ([request], [0])


async def test_of_a_window_only_what_is_seen_is_loaded() -> None:
    story = await Story(WINDOWED).stored()
    story.add()
    load = await story.step_with_a_load()
    # With a window of 5 tokens, the query at position 12 sees positions 8 to 12.
    assert [transfer.key[-1] for transfer in load.blocks] == [0, 0, 0, 1]


async def test_what_a_hit_brought_is_stored_before_the_window_leaves_it() -> None:
    groups = (CONFIG.all_groups[0], KVCacheGroup(AttentionType.SLIDING_WINDOW, 4, window=2))
    story = Story(replace(CONFIG, groups=groups), num_tier_blocks=6)
    for first in (100, 300):  # the second prompt evicts the first from the tier, not from the cache
        story.add(list(range(first, first + 13)))
        await story.run()
    request = story.add()
    plan = await story.step()
    assert (plan.num_computed_tokens, stores(plan)) == ([12], [])
    held = [set(table) for table in story.pool.core.block_tables(request.key)]
    metadata = (await story.step()).kv_connector_metadata
    assert metadata is not None
    assert [store.key[-1] for store in metadata.stores] == [0, 0, 0, 1]
    assert all(store.block in held[store.key[-1]] for store in metadata.stores)


async def test_of_states_the_last_one_is_loaded() -> None:
    story = Story(HYBRID)
    story.add(max_tokens=6)
    await story.run()
    # The prompt fills three blocks of keys and values, and a state is stored at its end. The
    # decoded tokens fill one more block, at whose end a state is stored, too.
    assert story.connector.stats.num_stored_blocks == 3 + 1 + 1 + 1
    assert await story.scheduler.reset_prefix_cache()
    request = story.add()
    load = await story.step_with_a_load()
    assert [transfer.key[-1] for transfer in load.blocks] == [0, 0, 0, 1]
    await story.run()
    assert (request.num_cached_tokens, request.num_external_tokens) == (12, 12)


async def test_a_load_ends_where_there_is_a_state() -> None:
    story = Story(HYBRID)
    story.add(max_tokens=6)
    await story.run()
    assert await story.scheduler.reset_prefix_cache()
    longer = story.add([*PROMPT, 7, 7, 7, 7, 1])
    part = story.add(PROMPT[:9])
    await story.run()
    assert (longer.num_external_tokens, part.num_external_tokens) == (16, 0)


async def test_a_hit_ends_where_the_window_before_it_is_there() -> None:
    story = await Story(WINDOWED).stored()
    hashes = story.add().block_hashes
    assert hashes == []
    request = story.scheduler.requests[0]
    request.hash_full_blocks(CONFIG.fingerprint, 4)
    lost = request.block_hashes[2] + (1).to_bytes(4, "big")
    story.connector.index.discard(lost, story.connector.index.pin(lost))
    match = story.connector.get_num_new_matched_tokens(request, 0)
    assert match is not None
    assert (match.num_tokens, match.is_async) == (8, True)


async def test_with_windows_a_damaged_block_voids_the_load() -> None:
    story = await Story(WINDOWED).stored()
    request = story.add()
    load = await story.step_with_a_load()
    story.finish_loads(load.blocks[-1].block)
    await story.step()
    plan = await story.step()
    metadata = plan.kv_connector_metadata
    assert metadata is not None
    assert [len(load.blocks) for load in metadata.loads] == [3], "to the end of the window before"
    await story.run()
    assert request.num_external_tokens == 8


async def test_a_window_that_is_the_only_group_is_not_cut_either() -> None:
    """The query at position 12 sees positions 8 to 12, which are loaded. If the load were cut to 8
    tokens, the query at position 8 would see positions 4 to 8, which are not.
    """
    story = await Story(
        replace(CONFIG, groups=(KVCacheGroup(AttentionType.SLIDING_WINDOW, 4, window=5),))
    ).stored()
    request = story.add()
    load = await story.step_with_a_load()
    story.finish_loads(load.blocks[-1].block)
    await story.step()
    metadata = (await story.step()).kv_connector_metadata
    assert metadata is not None
    assert len(metadata.loads) == 1, "to the end of the window before"
    await story.run()
    assert request.num_external_tokens == 8


async def test_a_block_that_a_window_gave_back_is_no_longer_its_request_s() -> None:
    groups = (KVCacheGroup(AttentionType.SLIDING_WINDOW, 4, window=5),)
    story = await Story(replace(CONFIG, groups=groups, num_blocks=6)).stored()
    running = story.add(list(range(300, 313)), max_tokens=20)
    plan = await story.step()
    first, *_ = plan.block_tables[running]
    while running.num_computed_tokens < 18:
        await story.step()
    story.add()
    load = await story.step_with_a_load()
    (transfer,) = load.blocks
    assert transfer.block in first[:4]
    story.finish_loads(transfer.block)
    num_computed = running.num_computed_tokens
    await story.step()
    assert running.num_computed_tokens == num_computed + 1
    await story.run()


async def test_the_tier_outlives_the_pool_but_not_what_was_not_certain() -> None:
    story = Story()
    story.add()
    await story.step()
    plan = await story.scheduler.schedule()
    assert len(stores(plan)) == 3
    story.scheduler.forget_pool()
    story.pool.reopen()
    assert len(story.connector.index) == 0, "the step that stores them may not have run"
    await story.run()
    assert len(story.connector.index) == 3
    story.scheduler.forget_pool()
    story.pool.reopen()
    assert len(story.connector.index) == 3
    request = story.add()
    await story.run()
    assert request.num_external_tokens == 12


async def test_a_load_that_was_lost_with_the_pool_begins_again() -> None:
    story = await Story(num_tier_blocks=3).stored()
    request = story.add()
    await story.step()
    story.scheduler.forget_pool()
    story.pool.reopen()
    story.loading = []
    await story.run()
    assert request.num_external_tokens == 12
    story.add(list(range(500, 513)))
    await story.run()
    assert story.connector.index.num_evictions == 3, "nothing is pinned any more"


async def test_after_a_reset_of_the_connector_nothing_is_loaded() -> None:
    story = await Story().stored()
    story.connector.reset_cache()
    request = story.add()
    await story.run()
    assert request.num_external_tokens == 0


async def test_an_aborted_load_leaves_its_blocks_when_it_has_ended() -> None:
    story = await Story().stored()
    request = story.add()
    await story.step()
    story.scheduler.abort(request)
    await story.step()
    assert story.pool.core.num_free_blocks == CONFIG.num_blocks - 1 - 3
    story.finish_loads()
    await story.step()
    assert story.pool.core.num_free_blocks == CONFIG.num_blocks - 1


async def test_a_tier_smaller_than_what_a_step_fills_stores_what_is_left_of_it() -> None:
    story = Story(num_tier_blocks=2)
    story.add()
    await story.step()
    # The tier has room for two blocks, so the last of the three full blocks is not stored.
    assert stores(await story.step()) == [(1, 0), (2, 1)]


async def test_a_full_tier_keeps_the_beginning_of_a_sequence_longest() -> None:
    story = await Story(num_tier_blocks=3).stored()
    story.add(list(range(300, 305)), max_tokens=1)
    await story.run()
    request = story.add()
    plan = await story.step()
    assert plan.kv_connector_metadata is not None
    assert [len(load.blocks) for load in plan.kv_connector_metadata.loads] == [2]
    await story.run()
    assert request.num_external_tokens == 8


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_decoded_blocks_are_stored_once_their_tokens_are_known(
    async_scheduling: bool,
) -> None:
    story = Story(replace(CONFIG, async_scheduling=async_scheduling))
    story.add(PROMPT[:3], max_tokens=10)
    stored: list[tuple[int, int]] = []
    while story.scheduler.has_work:
        stored += stores(await story.step())
    # The last of the 13 tokens is never computed, so only three blocks are full.
    assert [block for block, _ in stored] == [1, 2, 3]
