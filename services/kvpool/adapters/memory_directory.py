"""The directory of one process. Today MatchPrefix answers from it; it will stay the default where
there is no Redis.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile

from services.common.block_hash import BlockHash
from services.common.ids import PoolId
from services.common.kv_cache_groups import AttentionType, KVCacheGroup
from services.kvpool.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
)
from services.kvpool.core.ports import PoolMatch


@dataclass(slots=True)
class _Entry:
    generation: int
    groups: Sequence[KVCacheGroup]
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
        """Blocks of the longest prefix that every group can use.

        Each group in turn shortens it to the next one of its own, until all agree.
        """
        depth, num_agreeing = len(chain), 0
        while num_agreeing < len(self.groups):
            num_agreeing = 0
            for group, cached in zip(self.groups, self.cached, strict=True):
                longest = _usable(group, cached, chain, depth)
                num_agreeing += longest == depth
                depth = longest
        return depth


def _usable(
    group: KVCacheGroup, cached: AbstractSet[BlockHash], chain: Sequence[BlockHash], depth: int
) -> int:
    """Blocks of the longest prefix, at most so many, of which one group has all that it reads.

    Full attention looks from the left, since most chains are cached nowhere; others from the right.
    """
    if group.attention_type is AttentionType.FULL:
        return sum(1 for _ in takewhile(cached.__contains__, chain[:depth]))
    while depth:
        begin = group.first_seen_block(depth * group.block_size)
        missing = (at for at in range(depth - 1, begin - 1, -1) if chain[at] not in cached)
        gap = next(missing, None)
        if gap is None:
            break
        depth = gap
    return depth


class MemoryDirectory:
    """A set of hashes for each group of each pool; a Directory that never lags."""

    def __init__(self) -> None:
        self._entries: dict[PoolId, _Entry] = {}

    def open(self, pool_id: PoolId, generation: int, groups: Sequence[KVCacheGroup]) -> None:
        known = self._entries.get(pool_id)
        if known is None or known.generation < generation:
            self._entries[pool_id] = _Entry(generation, groups, [set() for _ in groups])

    def publish(self, pool_id: PoolId, batch: EventBatch) -> None:
        entry = self._entries.get(pool_id)
        if entry is None or entry.generation != batch.generation:
            return
        if batch.snapshot:
            entry.apply(AllBlocksCleared())
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
