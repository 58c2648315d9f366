"""The directory of one process: the same interface as a shared one, without anything to run."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.block_hash import BlockHash
from services.kvpool.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
)
from services.kvpool.core.ids import PoolId
from services.kvpool.core.ports import PoolMatch


@dataclass(slots=True)
class _Entry:
    generation: int
    cached: list[set[BlockHash]]

    def apply(self, event: Event) -> None:
        match event:
            case BlocksStored(group, hashes):
                self.cached[group].update(hashes)
            case BlocksRemoved(group, hashes):
                self.cached[group].difference_update(hashes)
            case AllBlocksCleared():
                for cached in self.cached:
                    cached.clear()

    def depth(self, chain: Sequence[BlockHash]) -> int:
        for position, block_hash in enumerate(chain):
            if not all(block_hash in cached for cached in self.cached):
                return position
        return len(chain)


class MemoryDirectory:
    """A set of hashes for each group of each pool; a Directory that never lags."""

    def __init__(self) -> None:
        self._entries: dict[PoolId, _Entry] = {}

    def open(self, pool_id: PoolId, generation: int, num_groups: int) -> None:
        """A pool begins a new life, empty; an older one than is known is passed over."""
        known = self._entries.get(pool_id)
        if known is None or known.generation < generation:
            self._entries[pool_id] = _Entry(generation, [set() for _ in range(num_groups)])

    def publish(self, pool_id: PoolId, batch: EventBatch) -> None:
        """Applies a batch, if it is of the newest generation."""
        entry = self._entries.get(pool_id)
        if entry is None or entry.generation != batch.generation:
            return
        if batch.snapshot:
            entry.apply(AllBlocksCleared())
        for event in batch.events:
            entry.apply(event)

    async def match(self, hashes: Sequence[BlockHash]) -> list[PoolMatch]:
        """The depth of a chain in each pool that holds its first block, ordered by pool."""
        return [
            PoolMatch(pool_id, entry.generation, depth)
            for pool_id, entry in sorted(self._entries.items())
            if (depth := entry.depth(hashes))
        ]

    def drop(self, pool_id: PoolId, generation: int) -> None:
        """Forgets a pool, if this is its newest generation."""
        entry = self._entries.get(pool_id)
        if entry is not None and entry.generation == generation:
            del self._entries[pool_id]
