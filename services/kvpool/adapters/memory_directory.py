"""A directory in the memory of one process, which answers MatchPrefix."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import PoolId
from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.prefix_depth import IsCached, prefix_depth
from services.kvpool.core import events
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.ports import PoolMatch


@dataclass(slots=True)
class _Entry:
    generation: int
    groups: Sequence[KVCacheGroup]
    cached: list[set[BlockHash]]

    def apply(self, event: events.Event) -> None:
        match event:
            case events.BlocksStored(group, hashes):
                self.cached[group].update(hashes)
            case events.BlocksRemoved(group, hashes):
                self.cached[group].difference_update(hashes)
            case events.AllBlocksCleared():
                for cached in self.cached:
                    cached.clear()

    def depth(self, chain: Sequence[BlockHash]) -> int:
        """The number of blocks in the longest prefix of `chain` that every group has cached."""
        is_cached = [_finder(cached, chain) for cached in self.cached]
        return prefix_depth(self.groups, is_cached, len(chain))


def _finder(cached: AbstractSet[BlockHash], chain: Sequence[BlockHash]) -> IsCached:
    return lambda index: chain[index] in cached


class MemoryDirectory:
    """A Directory that never lags: a set of hashes for each group of each pool."""

    def __init__(self) -> None:
        self._entries: dict[PoolId, _Entry] = {}

    def open(self, pool_id: PoolId, generation: int, config: PoolConfig) -> None:
        known = self._entries.get(pool_id)
        if known is None or known.generation < generation:
            cached: list[set[BlockHash]] = [set() for _ in config.groups]
            self._entries[pool_id] = _Entry(generation, config.groups, cached)

    def publish(self, pool_id: PoolId, batch: events.EventBatch) -> None:
        entry = self._entries.get(pool_id)
        if entry is None or entry.generation != batch.generation:
            return
        if batch.snapshot:
            entry.apply(events.AllBlocksCleared())
        for event in batch.events:
            entry.apply(event)

    async def match(self, hashes: Sequence[BlockHash]) -> list[PoolMatch]:
        return [
            PoolMatch(pool_id, entry.generation, depth)
            for pool_id, entry in sorted(self._entries.items())
            if (depth := entry.depth(hashes))
        ]

    def drop(self, pool_id: PoolId, generation: int) -> None:
        entry = self._entries.get(pool_id)
        if entry is not None and entry.generation == generation:
            del self._entries[pool_id]
