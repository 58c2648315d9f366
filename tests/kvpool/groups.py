"""KV-cache groups of each kind of attention, and pools with these groups."""

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig
from tests.kvpool.worked_examples import BLOCK_SIZE, admit, release

FULL = KVCacheGroup(AttentionType.FULL, BLOCK_SIZE)
WINDOW = KVCacheGroup(AttentionType.SLIDING_WINDOW, BLOCK_SIZE, 6)  # a query sees six tokens
CHUNK = KVCacheGroup(AttentionType.CHUNKED_LOCAL, BLOCK_SIZE, 8)  # a chunk is two blocks
STATE = KVCacheGroup(AttentionType.STATE_SPACE, BLOCK_SIZE, mamba_cache_mode=MambaCacheMode.ALIGN)


def pool_of(
    *groups: KVCacheGroup,
    num_blocks: int = 16,
    caching: bool = True,
    drop_last: bool = False,
    in_flight: int | None = None,
) -> KVPool:
    return KVPool(
        PoolConfig(
            num_blocks,
            groups,
            caching,
            drop_last_hit_block=drop_last,
            max_model_len=400,
            max_in_flight_tokens=in_flight,
        )
    )


def evict(pool: KVPool, num_blocks: int) -> None:
    """Evicts cached blocks: allocates `num_blocks` free blocks, and frees them without a hash."""
    admit(pool, 99, num_blocks * BLOCK_SIZE)
    release(pool, 99)
