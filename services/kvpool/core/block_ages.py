"""Measures how long cached blocks live, stay idle before eviction, and wait until their reuse.
These are vLLM's samples `kv_block_lifetime`, `kv_block_idle_before_evict` and `kv_block_reuse_gap`,
kept as sums and counts over all cached blocks. The unit of time is one transaction.
"""

from collections.abc import Sequence

from services.common.pool.ids import BlockId


class BlockAges:
    """Sums of block ages since the pool was opened. The owner of this object must add 1 to `now` in
    each transaction, and 1 to `num_resets` when the whole prefix index is cleared. Cleared blocks
    do not count as evicted.
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
        published_at, now = self._published_at, self.now
        for block in blocks:
            published_at[block] = now

    def reused(self, free_since: Sequence[int]) -> None:
        """Records prefix hits on free blocks, which were freed at the times `free_since`."""
        self.num_reuses += len(free_since)
        self.reuse_gap += self.now * len(free_since) - sum(free_since)

    def evicted(self, blocks: Sequence[BlockId], free_since: Sequence[int]) -> None:
        """Records evictions of cached blocks. `blocks[i]` was freed at `free_since[i]`."""
        self.num_evictions += len(blocks)
        self.lifetime += self.now * len(blocks) - sum(map(self._published_at.__getitem__, blocks))
        self.idle_before_evict += self.now * len(blocks) - sum(free_since)
