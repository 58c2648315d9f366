"""Scheduling with KV-cache groups of several kinds of attention. A block has four tokens."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.common.pool.ids import RequestKey
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.common.pool.operations import Grow, Operation, Outcome
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv.capacity import config_conflict, max_request_tokens
from services.scheduler.core.output import ModelRunnerOutput, WaitReason
from services.scheduler.core.ports import KVPool
from services.simulation.inprocess_pool import InProcessPool
from tests.scheduler.paged_model import continuation
from tests.scheduler.story import BLOCK_SIZE, Story, prompt

FULL = KVCacheGroup(AttentionType.FULL, BLOCK_SIZE)
WINDOW = KVCacheGroup(AttentionType.SLIDING_WINDOW, BLOCK_SIZE, 6)  # a query sees six tokens
CHUNK = KVCacheGroup(AttentionType.CHUNKED_LOCAL, BLOCK_SIZE, 8)  # a chunk is two blocks
STATE = KVCacheGroup(AttentionType.STATE_SPACE, BLOCK_SIZE, mamba_cache_mode=MambaCacheMode.ALIGN)


def tables(story: Story, key: int) -> tuple[tuple[int, ...], ...]:
    """The pool's block tables of a request. The first request that is added has the key 1."""
    return story.pool.core.block_tables(RequestKey(key))


class Overheard:
    def __init__(self, pool: InProcessPool) -> None:
        self.operations: list[Operation] = []
        self._pool = pool

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        self.operations += operations
        return await self._pool.transact(operations, traceparent)

    @property
    def grown(self) -> list[tuple[list[int], list[int]]]:
        """For each Grow operation, the `num_computed_tokens` and `num_slots` of its requests."""
        return [
            (list(operation.num_computed_tokens), list(operation.num_slots))
            for operation in self.operations
            if isinstance(operation, Grow)
        ]


# Windows


async def test_a_window_gives_back_what_no_later_query_sees() -> None:
    story = Story(groups=(FULL, WINDOW), num_blocks=16)
    story.add("a", prompt(8), max_tokens=9)
    await story.step()
    assert tables(story, 1) == ((1, 2), (3, 4))
    await story.step()  # query 8 sees tokens 3 to 8
    assert tables(story, 1) == ((1, 2, 5), (3, 4, 6))
    await story.step()  # query 9 sees tokens 4 to 9
    assert tables(story, 1) == ((1, 2, 5), (0, 4, 6))
    await story.steps(2)
    assert tables(story, 1) == ((1, 2, 5), (0, 4, 6))
    await story.step()  # query 12 sees tokens 7 to 12
    assert tables(story, 1) == ((1, 2, 5, 7), (0, 4, 6, 8))
    await story.step()  # query 13 sees tokens 8 to 13
    assert tables(story, 1) == ((1, 2, 5, 7), (0, 0, 6, 8))
    await story.run()


async def test_a_long_prompt_runs_through_a_window_in_a_pool_that_could_not_hold_it() -> None:
    story = Story(groups=(WINDOW,), num_blocks=6, max_num_batched_tokens=8, max_model_len=200)
    request = story.add("a", prompt(80), max_tokens=20)
    await story.run()
    assert request.token_ids == prompt(80) + continuation(prompt(80), 20)


async def test_a_window_does_not_move_over_tokens_of_a_step_in_flight() -> None:
    heard: list[Overheard] = []

    def overhear(pool: InProcessPool) -> KVPool:
        heard.append(Overheard(pool))
        return heard[0]

    story = Story(
        groups=(WINDOW,), through=overhear, async_scheduling=True, num_speculative_tokens=3
    )
    story.add("a", prompt(8))
    prefill = await story.scheduler.schedule()
    assert (prefill.num_computed_tokens, prefill.num_scheduled_tokens) == ([0], [8])
    # While the prompt is in flight, the next step computes the ninth token and three drafts.
    first = await story.scheduler.schedule()
    assert (first.num_computed_tokens, first.num_scheduled_tokens) == ([8], [4])
    assert heard[0].grown == [([0], [12])]
    story.scheduler.update_from_output(prefill, ModelRunnerOutput([[500]]))
    # Twelve tokens count as computed. Four of them, three of which are drafts, are in flight.
    second = await story.scheduler.schedule()
    assert (second.num_computed_tokens, second.num_scheduled_tokens) == ([12], [4])
    assert heard[0].grown[1:] == [([8], [16])]
    # Query 12 sees tokens 7 to 12. But query 8, which is in flight, sees token 3 in block 1.
    assert tables(story, 1) == ((1, 2, 3, 4),)
    story.scheduler.update_from_output(first, ModelRunnerOutput([[501]]))
    third = await story.scheduler.schedule()
    assert third.num_computed_tokens == [13]
    assert heard[0].grown[2:] == [([9], [17])]
    assert tables(story, 1) == ((0, 2, 3, 4, 5),)


async def test_a_request_resumes_in_a_window_of_its_own_old_blocks() -> None:
    story = Story(groups=(FULL, WINDOW), num_blocks=40)
    request = story.add("a", prompt(22), max_tokens=10)
    await story.steps(4)
    story.scheduler.preempt_all()
    told = await story.step()
    assert (told.resumed, told.start) == (["a"], {"a": 24})
    assert tables(story, 1)[1][:4] == (0, 0, 0, 0)  # query 24 sees tokens 19 to 24
    await story.run()
    assert request.token_ids == prompt(22) + continuation(prompt(22), 10)


async def test_two_groups_of_full_attention_take_twice_the_blocks() -> None:
    story = Story(groups=(FULL, FULL), num_blocks=9)
    story.add("a", prompt(9))
    story.add("b", prompt(8, 300))
    told = await story.step()
    assert (told.new, story.waiting) == (["a"], ["b"])  # a needs three blocks in each group
    assert tables(story, 1) == ((1, 2, 3), (4, 5, 6))
    assert told.round_trips == 2


# EAGLE draft heads, for which hits lack their last block


async def test_a_burst_that_shares_a_prompt_is_admitted_at_once_where_hits_drop_a_block() -> None:
    story = Story(groups=(FULL,), drop_last_hit_block=True)
    for number in range(4):
        story.add(f"r{number}", prompt(12) + prompt(3, 500 + 10 * number))
    told = await story.step()
    assert told.start == {"r0": 0, "r1": 8, "r2": 8, "r3": 8}
    assert told.round_trips == 2  # one for growth and look-ups, one for all admissions
    await story.run()


# State-space layers


async def test_a_prompt_is_computed_in_chunks_that_end_where_blocks_end() -> None:
    story = Story(groups=(STATE,), max_num_batched_tokens=10)
    story.add("a", prompt(23))
    chunks = [told.granted["a"] for told in await story.steps(4)]
    assert chunks == [8, 8, 4, 3]  # chunks of at most 10 tokens end at 8, 16, and 20


async def test_a_short_prompt_is_cut_at_its_last_boundary() -> None:
    story = Story(groups=(FULL, STATE))
    story.add("a", prompt(10))
    assert (await story.step()).granted == {"a": 8}
    assert (await story.step()).granted == {"a": 2}
    story.add("b", prompt(9))
    told = await story.step()
    assert (told.start["b"], told.granted["b"]) == (8, 1)  # the state after 8 tokens is cached


async def test_a_state_is_found_only_after_the_step_that_computes_it() -> None:
    story = Story(groups=(FULL, STATE))
    story.add("a", prompt(10))
    story.add("b", prompt(10))
    story.add("c", prompt(10, 300))
    told = await story.step()
    # Request b waits for the state that request a stores. Request c waits behind b.
    assert (told.start, story.waiting) == ({"a": 0}, ["b", "c"])
    told = await story.step()
    assert (told.start["b"], told.start["c"]) == (8, 0)
    await story.run()


async def test_a_budget_that_reaches_no_boundary_is_left_to_the_next_step() -> None:
    story = Story(groups=(STATE,), max_num_batched_tokens=5)
    for number in range(2):
        story.add(f"r{number}", prompt(4, 300 * number), max_tokens=4)
    assert (await story.step()).granted == {"r0": 4}  # budget for one token is left, r1 needs four
    told = await story.step()
    assert told.granted == {"r0": 1, "r1": 4}
    story.add("long", prompt(9, 700))
    plan = await story.scheduler.schedule()
    assert [request.request_id for request in plan.requests] == ["r0", "r1"]
    assert plan.wait_reason is WaitReason.BUDGET


async def test_without_prefix_caching_states_need_no_boundaries() -> None:
    state = replace(STATE, mamba_cache_mode=MambaCacheMode.NONE)
    story = Story(groups=(state,), max_num_batched_tokens=10, enable_prefix_caching=False)
    story.add("a", prompt(23))
    assert [told.granted["a"] for told in await story.steps(3)] == [10, 10, 3]


async def test_a_threshold_below_a_block_lets_steps_end_inside_it_and_at_its_end() -> None:
    story = Story(groups=(STATE,), long_prefill_token_threshold=3)
    story.add("a", prompt(9), max_tokens=2)
    story.add("b", prompt(9, 300), max_tokens=2)
    assert (await story.step()).granted == {"a": 3, "b": 3}
    assert (await story.step()).granted == {"a": 1, "b": 1}
    await story.run()


async def test_where_hits_drop_a_block_the_last_state_of_use_lies_one_block_earlier() -> None:
    story = Story(groups=(FULL, STATE), drop_last_hit_block=True)
    story.add("a", prompt(14))
    assert [told.granted["a"] for told in await story.steps(2)] == [8, 6]
    story.add("b", prompt(14))
    # Full attention has twelve tokens cached, but drops four: the cached state is after eight.
    assert (await story.step()).start["b"] == 8


async def test_blocks_of_attention_that_may_have_held_states_are_zeroed() -> None:
    story = Story(groups=(FULL, STATE), num_blocks=30)
    story.add("a", prompt(10), max_tokens=4)
    told = await story.step()
    assert tables(story, 1) == ((1, 2), (0, 3))
    assert told.zeroed == [1, 2]
    told = await story.step()
    assert tables(story, 1) == ((1, 2, 4), (0, 3, 5))
    assert told.zeroed == [4]
    story.add("b", prompt(10), max_tokens=4)
    told = await story.step()
    # Blocks 1 and 2, and the state in block 3, are prefix hits and are not zeroed.
    assert tables(story, 2) == ((1, 2, 6), (0, 3, 7))
    assert told.zeroed == [6]


# The longest requests, and configurations that cannot be served


def config(*groups: KVCacheGroup, **fields: int | bool) -> SchedulerConfig:
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 1000,
        "block_size": BLOCK_SIZE,
        "num_blocks": 13,
    }
    return SchedulerConfig(groups=groups, **limits | fields)


@pytest.mark.parametrize(
    ("groups", "longest"),
    [
        ((), 48),
        ((FULL,), 48),
        ((FULL, FULL), 24),
        ((FULL, FULL, FULL), 16),
        ((WINDOW,), 1000),  # never more than 5 blocks: a window of 6 tokens and a step of 8
        ((CHUNK,), 1000),  # never more than 4 blocks
        ((STATE,), 1000),  # never more than 2 blocks
        ((FULL, WINDOW), 28),  # 7 and 5 blocks
        ((FULL, STATE), 40),  # 10 and 2 blocks
        ((FULL, WINDOW, CHUNK, STATE), 12),  # 3, 3, 3 and 2 blocks
        ((WINDOW, WINDOW, WINDOW), 16),  # 4 blocks each, as 3 * 5 blocks would be too many
    ],
)
def test_the_longest_request_is_one_that_all_groups_hold(
    groups: tuple[KVCacheGroup, ...], longest: int
) -> None:
    assert max_request_tokens(config(*groups)) == longest


def test_drafts_that_may_yet_be_rejected_hold_a_window_open() -> None:
    # A step of five tokens, with the five tokens before it, covers at most four blocks. With
    # drafts, four tokens in flight may lie between the two, so that up to five blocks are covered.
    small = {"num_blocks": 5, "max_num_batched_tokens": 5}
    assert max_request_tokens(config(WINDOW, **small)) == 1000
    assert max_request_tokens(config(WINDOW, **small, num_speculative_tokens=4)) == 16


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE), (WINDOW, WINDOW, WINDOW)])
async def test_the_longest_request_runs_to_its_end(groups: tuple[KVCacheGroup, ...]) -> None:
    longest = max_request_tokens(config(*groups))
    story = Story(groups=groups, num_blocks=13, max_num_batched_tokens=8, max_model_len=longest)
    request = story.add("a", prompt(longest - 5), max_tokens=100)
    await story.run()
    assert request.num_tokens == longest


def test_what_states_cannot_be_served_with_is_said_in_a_sentence() -> None:
    assert config_conflict(config(FULL)) is None
    assert config_conflict(config(FULL, STATE)) is None
    overwritten = replace(STATE, mamba_cache_mode=MambaCacheMode.NONE)
    conflict = config_conflict(config(FULL, overwritten))
    assert conflict is not None
    assert "start the workers with mamba_cache_mode align, or disable prefix caching" in conflict
    assert config_conflict(config(FULL, overwritten, enable_prefix_caching=False)) is None
    whole = config_conflict(config(STATE, enable_chunked_prefill=False))
    assert whole is not None
    assert "enable chunked prefill" in whole
    divided = config_conflict(config(STATE, disable_chunked_mm_input=True))
    assert divided is not None
    assert "set disable_chunked_mm_input to false" in divided
    small = config(STATE, max_num_batched_tokens=3)  # steps may end inside a block
    assert config_conflict(small) is None
