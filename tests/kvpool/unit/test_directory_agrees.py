"""The directory's answer for a pool equals the pool's own prefix hits."""

import asyncio
import random
from dataclasses import replace

import pytest

from services.common.pool.ids import PoolId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.common.pool.operations import Admit, BeginStep, Lookup
from services.kvpool.adapters.memory_directory import MemoryDirectory
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.pool_host import PoolHost
from tests.kvpool.worked_examples import (
    BLOCK_SIZE,
    admission,
    commit,
    grow,
    hashes,
    lookup,
    release,
)

FULL = KVCacheGroup(AttentionType.FULL, BLOCK_SIZE)
WINDOW = KVCacheGroup(AttentionType.SLIDING_WINDOW, BLOCK_SIZE, 6)
CHUNK = KVCacheGroup(AttentionType.CHUNKED_LOCAL, BLOCK_SIZE, 8)
WIDE_FULL = KVCacheGroup(AttentionType.FULL, 2 * BLOCK_SIZE)
WIDE_WINDOW = KVCacheGroup(AttentionType.SLIDING_WINDOW, 3 * BLOCK_SIZE, 6)
STATE = KVCacheGroup(AttentionType.STATE_SPACE, BLOCK_SIZE, mamba_cache_mode=MambaCacheMode.ALIGN)


@pytest.mark.parametrize(
    "groups",
    [
        (FULL,),
        (WINDOW,),
        (CHUNK,),
        (STATE,),
        (FULL, WINDOW),
        (STATE, FULL),
        (WINDOW, CHUNK, STATE, FULL),
        (WINDOW, WIDE_FULL),
        (FULL, WIDE_WINDOW),
        (WIDE_FULL, WIDE_WINDOW, WINDOW),
    ],
    ids=lambda groups: "+".join(f"{one.attention_type.value}-{one.block_size}" for one in groups),
)
def test_a_directory_is_as_deep_as_the_pool(groups: tuple[KVCacheGroup, ...]) -> None:
    directory, rng = MemoryDirectory(), random.Random(3)
    host: PoolHost[str] = PoolHost([directory], lambda: 1, max_pools=1, max_blocks_per_pool=100)
    hosted = host.open(PoolId("p"), PoolConfig(40, groups))
    pool, depths = hosted.pool, set()
    for request in range(1, 200, 2):
        path = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 7)))
        tokens = len(path) * BLOCK_SIZE
        looked_up = pool.transact([BeginStep(), Lookup([request], [tokens - 1], [hashes(path)])])
        ((hit, boundary),) = looked_up.hits
        terms = replace(admission(request, tokens, hit=hit), shared_prefix_boundary=boundary)
        assert pool.transact([Admit([terms])]).stop is None
        commit(pool, request, tokens)
        grow(pool, request, tokens + 1, computed=tokens)
        release(pool, request)
        host.publish_events(hosted)
        asked = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 7)))
        found = asyncio.run(directory.match(hashes(asked)))
        depth = lookup(pool, request + 1, len(asked) * BLOCK_SIZE, asked) // BLOCK_SIZE
        release(pool, request + 1)
        assert [match.num_blocks for match in found] == ([depth] if depth else [])
        depths.add(depth)
    assert len(depths) > 1
