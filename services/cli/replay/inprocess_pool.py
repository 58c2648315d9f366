"""The scheduler's pool port over the pool's core in the same process, without gRPC."""

from collections.abc import Sequence

from services.common.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool_operations import Operation, Outcome
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig


class InProcessPool:
    """A scheduler's `KVPool` that calls the pool directly.

    Without `groups` it has one group, of full attention. `core` is the pool, for inspection.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        groups: Sequence[KVCacheGroup] = (),
        drop_last_hit_block: bool = False,
    ) -> None:
        groups = groups or [KVCacheGroup(AttentionType.FULL, block_size)]
        self.core = KVPool(
            PoolConfig(
                num_blocks=num_blocks,
                groups=tuple(groups),
                enable_prefix_caching=enable_prefix_caching,
                fingerprint=b"",
                drop_last_hit_block=drop_last_hit_block,
            )
        )
        self.num_transactions = 0

    async def transact(
        self,
        operations: Sequence[Operation],
        traceparent: str = "",  # noqa: ARG002 - there are no spans in process
    ) -> Outcome:
        self.num_transactions += 1
        return self.core.transact(operations)
