"""How long cached blocks live, lie idle, and wait to be used again.

What vLLM samples as `kv_block_lifetime`, `kv_block_idle_before_evict` and `kv_block_reuse_gap`, for
every cached block, as sums with their counts. Time is counted in transactions.
"""

from collections.abc import Sequence

from services.common.pool.ids import BlockId


class BlockAges:
    """Sums since the pool was opened. The owner adds 1 to `now` with each transaction, and to
    `num_resets` when every hash is forgotten at once, which is no eviction.
    """

    __slots__ = (
        "_published_at",
        "idle_before_evict",
        "lifetime",
        "now",
        "num_evictions",
        "num_resets",
        "num_reuses",
        "reuse_gap",
    )

    def __init__(self, num_blocks: int) -> None:
        self.now = 0
        self.num_evictions = 0
        self.num_reuses = 0
        self.num_resets = 0
        self.lifetime = 0
        self.idle_before_evict = 0
        self.reuse_gap = 0
        self._published_at = [0] * num_blocks

    def published(self, blocks: Sequence[BlockId]) -> None:
        """Blocks can be found from now on."""
        published_at, now = self._published_at, self.now
        for block in blocks:
            published_at[block] = now

    def reused(self, free_since: Sequence[int]) -> None:
        """Free blocks, each free since the time given, were found by a prefix."""
        self.num_reuses += len(free_since)
        self.reuse_gap += self.now * len(free_since) - sum(free_since)

    def evicted(self, blocks: Sequence[BlockId], free_since: Sequence[int]) -> None:
        """Cached blocks, each free since the time beside it, are reused for something else."""
        self.num_evictions += len(blocks)
        self.lifetime += self.now * len(blocks) - sum(map(self._published_at.__getitem__, blocks))
        self.idle_before_evict += self.now * len(blocks) - sum(free_since)
