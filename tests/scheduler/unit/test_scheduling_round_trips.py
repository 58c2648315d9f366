"""How many pool transactions (round trips) a step takes, which cost time with a remote pool."""

from collections.abc import Sequence

from services.common.pool.operations import Lookup, Operation, Outcome
from services.scheduler.core.ports import KVPool
from tests.scheduler.story import Story, prompt


class Lookups:
    """A pool that records how many prefixes each transaction looks up."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.nums: list[int] = []

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        self.nums += [len(one.requests) for one in operations if isinstance(one, Lookup)]
        return await self._pool.transact(operations, traceparent)


async def test_a_decode_step_inside_a_block_asks_nothing() -> None:
    story = Story()
    story.add("a", prompt(4))
    story.add("b", prompt(4, first=500))
    told = await story.steps(5)
    assert [step.round_trips for step in told] == [2, 1, 0, 0, 1], (
        "admission; the fifth token needs a block; two inside it; the eighth fills it"
    )


async def test_without_caching_only_crossing_asks() -> None:
    story = Story(enable_prefix_caching=False)
    story.add("a", prompt(4))
    told = await story.steps(6)
    assert [step.round_trips for step in told] == [1, 1, 0, 0, 0, 1]


async def test_a_step_that_admits_asks_twice_however_many_it_admits() -> None:
    story = Story(max_num_seqs=40, num_blocks=200, max_num_batched_tokens=200)
    for number in range(30):
        story.add(f"r{number}", prompt(4, first=10 * number))
    assert (await story.step()).round_trips == 2


async def test_growth_and_look_up_share_a_round_trip() -> None:
    story = Story()
    story.add("a", prompt(4))
    await story.step()
    story.add("b", prompt(4, first=500))
    told = await story.step()
    assert (told.blocks, told.round_trips) == ({"a": [2], "b": [3]}, 2)


async def test_releases_travel_with_the_next_transaction() -> None:
    story = Story()
    story.add("a", prompt(4), max_tokens=1)
    await story.step()
    assert story.pool.core.num_free_blocks == 98
    story.add("b", prompt(4, first=500))
    assert (await story.step()).round_trips == 2
    assert story.pool.core.num_free_blocks == 98


async def test_each_victim_costs_one_more() -> None:
    story = Story(num_blocks=7)
    for name, first in (("a", 100), ("b", 300), ("c", 500)):
        story.add(name, prompt(8, first))
    assert (await story.step()).round_trips == 2
    told = await story.step()
    assert (told.preempted, told.round_trips) == (["c"], 2)


async def test_a_head_that_cannot_fit_costs_nothing_step_after_step() -> None:
    story = Story(num_blocks=6, enable_prefix_caching=False)
    story.add("a", prompt(15))
    await story.step()
    story.add("b", prompt(12, first=500))
    assert [step.round_trips for step in await story.steps(2)] == [0, 1]
    assert story.waiting == ["b"]


async def test_without_work_flushing_asks_nothing() -> None:
    story = Story()
    await story.scheduler.flush()
    assert story.pool.num_transactions == 0


async def test_flushing_gives_back_now_what_would_go_with_the_next_step() -> None:
    story = Story()
    request = story.add("a", prompt(4))
    await story.step()
    story.scheduler.abort(request)
    await story.scheduler.flush()
    assert story.pool.core.num_free_blocks == 99
    assert story.scheduler.kv_cache_manager.num_free_blocks == 99


async def test_few_prefixes_are_looked_up_while_blocks_are_missing() -> None:
    """Twenty requests wait, of which five fit into the pool at once."""
    pools: list[Lookups] = []

    def counting(pool: KVPool) -> KVPool:
        pools.append(Lookups(pool))
        return pools[0]

    story = Story(max_num_seqs=40, num_blocks=12, max_num_batched_tokens=400, through=counting)
    for number in range(20):
        story.add(f"r{number}", prompt(8, first=10 * number), max_tokens=9)
    await story.steps(3)
    assert pools[0].nums == [20, 4, 4]
