"""An LRU index of the blocks in the workers' tier (host memory for offloaded KV blocks)."""

from collections import OrderedDict

from services.common.pool.block_hash import BlockHash
from services.scheduler.core.kv_transfer import TierBlockId


def tier_key(block_hash: BlockHash, group: int) -> bytes:
    """The key of a block in the tier, as in vLLM: the block hash and the number of the KV-cache
    group, because groups store different layers of the same tokens.
    """
    return block_hash + group.to_bytes(4, "big")


class TierIndex:
    """Maps keys to blocks of the tier, the least recently used key first.

    A block is pinned while a load reads it, and is then not evicted. One index is enough for all
    ranks, because their tiers have the same keys in the same blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._blocks: OrderedDict[bytes, TierBlockId] = OrderedDict()
        self._pins: dict[TierBlockId, int] = {}
        self._orphans: set[TierBlockId] = set()
        """Pinned blocks whose key was removed. They are freed when they are unpinned."""
        self._free: list[TierBlockId] = []
        self.clear()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def touch(self, key: bytes) -> None:
        self._blocks.move_to_end(key)

    def put(self, key: bytes) -> TierBlockId | None:
        """Allocates a block for a new key. May evict another key. None if all are pinned."""
        if not self._free and not self._evict():
            return None
        block = self._blocks[key] = self._free.pop()
        return block

    def pin(self, key: bytes) -> TierBlockId:
        """Pins the block of a key for a load, and marks the key as used."""
        block = self._blocks[key]
        self._pins[block] = self._pins.get(block, 0) + 1
        self.touch(key)
        return block

    def unpin(self, block: TierBlockId) -> None:
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
            if block in self._orphans:
                self._orphans.remove(block)
                self._free.append(block)

    def discard(self, key: bytes, block: TierBlockId) -> None:
        """Removes a key. Does nothing if the key no longer maps to this block."""
        if self._blocks.get(key) == block:
            del self._blocks[key]
            if block in self._pins:
                self._orphans.add(block)
            else:
                self._free.append(block)

    def unpin_all(self) -> None:
        self._pins.clear()
        self._free += self._orphans
        self._orphans.clear()

    def clear(self) -> None:
        self._blocks.clear()
        self._pins.clear()
        self._orphans.clear()
        self._free = [TierBlockId(number) for number in reversed(range(self.num_blocks))]

    def _evict(self) -> bool:
        for key, block in self._blocks.items():
            if block not in self._pins:
                del self._blocks[key]
                self._free.append(block)
                self.num_evictions += 1
                return True
        return False

    def check(self) -> None:
        """Raises AssertionError unless each block is free, mapped by one key, or an orphan."""
        named = list(self._blocks.values())
        every = sorted([*named, *self._free, *self._orphans])
        assert every == list(range(self.num_blocks)), "a block is missing or counted twice"
        assert self._orphans <= self._pins.keys(), "an orphan is not pinned"
