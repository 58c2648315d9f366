"""How long cached blocks live, lie idle, and wait to be used again.

What vLLM samples as `kv_block_lifetime`, `kv_block_idle_before_evict` and `kv_block_reuse_gap`, for
every cached block, as sums whose counts stand beside them. Time is counted in transactions, one an
engine step or so: the pool has no clock, and a run that is played again gives the same numbers.
"""

from collections.abc import Collection, Sequence

from services.kvpool.core.ids import BlockId


class BlockAges:
    """Sums since the pool was opened; the owner moves `now` on with each transaction."""

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

    def __init__(self) -> None:
        self.now = 0
        self.num_evictions = 0
        self.num_reuses = 0
        self.num_resets = 0
        self.lifetime = 0
        self.idle_before_evict = 0
        self.reuse_gap = 0
        self._published_at: dict[BlockId, int] = {}

    def published(self, blocks: Sequence[BlockId]) -> None:
        """Blocks can be found from now on."""
        self._published_at.update(dict.fromkeys(blocks, self.now))

    def reused(self, free_since: int) -> None:
        """A block that nobody held since then was found by a prefix."""
        self.num_reuses += 1
        self.reuse_gap += self.now - free_since

    def evicted(self, blocks: Sequence[tuple[BlockId, int]]) -> None:
        """Cached blocks, each with the time since which it was free, are reused for something else.

        They lived since they were published, and were idle since they were free.
        """
        published_at, now = self._published_at, self.now
        self.num_evictions += len(blocks)
        for block, free_since in blocks:
            self.lifetime += now - published_at.pop(block)
            self.idle_before_evict += now - free_since

    def reset(self) -> None:
        """Every hash is forgotten at once, which is no eviction."""
        self.num_resets += 1
        self._published_at.clear()

    def check(self, cached: Collection[BlockId]) -> None:
        """The blocks in the indexes have an age, and no others. Raises AssertionError."""
        assert self._published_at.keys() == set(cached), "ages of other blocks than are cached"
