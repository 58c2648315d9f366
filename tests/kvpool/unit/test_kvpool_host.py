"""The pools of a kvpool process. Opening a pool increases its generation number."""

import pytest

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.kvpool.adapters.memory_directory import MemoryDirectory
from services.kvpool.core.errors import InvalidPool, PoolNotFound, StaleGeneration, TooManyPools
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.pool_host import PoolHost, TransactionLedger
from services.kvpool.core.ports import PoolMatch
from tests.kvpool.worked_examples import admit, hashes

CONFIG = PoolConfig(8, (KVCacheGroup(AttentionType.FULL, 4),))


def make_host(now: int, *sinks: MemoryDirectory) -> PoolHost[str]:
    return PoolHost(sinks, lambda: now, max_pools=2, max_blocks_per_pool=8)


def test_generations_grow_even_when_the_clock_stands():
    host = make_host(100)
    assert [host.open("a", CONFIG).generation for _ in range(3)] == [100, 101, 102]
    assert host.open("b", CONFIG).generation == 103


def test_generations_grow_over_a_restart_of_the_process():
    assert make_host(500).open("a", CONFIG).generation > make_host(400).open("a", CONFIG).generation


def test_generations_grow_where_the_clock_was_set_back_before_a_restart():
    assert make_host(100).open("a", CONFIG, 500).generation == 501
    with pytest.raises(InvalidPool) as refused:
        make_host(100).open("a", CONFIG, 2**62)
    assert refused.value.field == "seen_generation"


@pytest.mark.parametrize("generation", [0, 6, 8])
def test_any_other_generation_is_refused(generation):
    with pytest.raises(StaleGeneration):
        TransactionLedger[str](7).find(generation, 1)


def test_a_refused_opening_leaves_the_pool_as_it_was():
    host = make_host(100)
    opened = host.open("a", CONFIG)
    with pytest.raises(InvalidPool):
        host.open("a", PoolConfig(9, CONFIG.groups))
    assert host.get("a") is opened


def test_pools_beyond_the_limit_and_blocks_beyond_it_are_refused():
    host = make_host(100)
    host.open("a", CONFIG)
    host.open("b", CONFIG)
    with pytest.raises(TooManyPools):
        host.open("c", CONFIG)
    with pytest.raises(PoolNotFound):
        host.get("c")
    assert [hosted.pool_id for hosted in host.pools()] == ["a", "b"]


async def test_what_a_pool_caches_is_passed_on():
    directory = MemoryDirectory()
    host = make_host(100, directory)
    hosted = host.open("a", CONFIG)
    admit(hosted.pool, 1, 8, path="ab")
    assert await directory.match(hashes("ab")) == []
    host.publish_events(hosted)
    assert await directory.match(hashes("ab")) == [PoolMatch("a", 100, 2)]
    assert hosted.num_batches == 1
    host.publish_events(hosted)
    assert hosted.num_batches == 1
