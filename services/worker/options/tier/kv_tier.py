"""A tier of host memory to which KV-cache blocks are offloaded, with keys and values or recurrent
states.

The tier consists of blocks that are as large as blocks of the KV cache. The scheduler decides what
they contain: each step names the blocks to store in the tier and the blocks to load back. The tier
keeps its contents when the scheduler opens the KV pool again, which empties the batch.

Blocks are stored before a step writes anything, because the step may overwrite these blocks of the
KV cache. A LoadThread loads blocks while steps run. No step uses the target blocks before their
load has ended. If the target blocks must be cleared, the step that begins the load clears them.

For each block, the tier records a key that identifies the contents, and a checksum of the bytes. A
load compares both. If one of them differs, the block is reported as not loaded, and the scheduler
has its tokens computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from services.worker.backends.arrays import Int32Array, UInt8Array
from services.worker.core.kv import load_thread
from services.worker.core.step import EndedTierLoad, TierBlocks, TierLoad


def tier_memory(num_blocks: int, bytes_per_block: int) -> UInt8Array:
    """Allocates uint8 [num_blocks, bytes_per_block], and writes to it, so that the operating system
    provides the memory now and not while requests run.
    """
    memory = np.empty((num_blocks, bytes_per_block), np.uint8)
    memory.fill(0)
    return memory


@dataclass(frozen=True, slots=True)
class _Held:
    key: bytes
    checksum: int


class KVTier:
    """Copies blocks between the KV cache and the tier.

    `memory` is uint8 [num_blocks, bytes_per_block]. `pages` are the tensors in which the KV cache
    stores the blocks (see PagesOfKeys).
    """

    def __init__(self, memory: UInt8Array, pages: Sequence[torch.Tensor]) -> None:
        self.memory = memory
        self._held: list[_Held | None] = [None] * len(memory)
        self._views: list[tuple[UInt8Array, UInt8Array]] = []
        """For each page, a view of its bytes in the tier, [num_blocks, parts, bytes], and a view of
        its bytes in the KV cache, [parts, num_blocks, bytes]. The parts are keys and values.
        """
        offset = 0
        for page in pages:
            cache = page.flatten(2).view(torch.uint8).numpy()
            num_parts, _, size = cache.shape
            end = offset + num_parts * size
            tier = memory[:, offset:end].reshape(len(memory), num_parts, size)
            self._views.append((tier, cache))
            offset = end
        if offset != memory.shape[1]:
            raise AssertionError(f"pages of {offset} bytes, and blocks of {memory.shape[1]}")
        self._loads = load_thread.LoadThread(self._load)

    def store(self, blocks: TierBlocks) -> None:
        theirs = blocks.tier_block_ids
        for cache, tier, count in _runs(blocks.block_ids, theirs):
            for tier_pages, cache_pages in self._views:
                source = cache_pages[:, cache : cache + count].swapaxes(0, 1)
                np.copyto(tier_pages[tier : tier + count], source)
        for number, key in zip(theirs.tolist(), blocks.keys, strict=True):
            self._held[number] = _Held(key, xxh3_64_intdigest(self.memory[number]))

    def begin_loads(self, loads: Sequence[TierLoad]) -> None:
        self._loads.begin(loads)

    def take_ended(self, *, is_idle: bool) -> tuple[EndedTierLoad, ...]:
        return self._loads.take_ended(is_idle=is_idle)

    def reset(self) -> None:
        self._loads.reset()

    def _load(self, blocks: TierBlocks) -> Int32Array:
        """Copies blocks whose key and checksum match from the tier. Returns the target blocks in
        the KV cache that were not loaded, because key or checksum differs.
        """
        fits = np.array(
            [
                self._fits(number, key)
                for number, key in zip(blocks.tier_block_ids.tolist(), blocks.keys, strict=True)
            ],
            bool,
        )
        mine, theirs = blocks.block_ids[fits], blocks.tier_block_ids[fits]
        for cache, tier, count in _runs(mine, theirs):
            for tier_pages, cache_pages in self._views:
                target = cache_pages[:, cache : cache + count].swapaxes(0, 1)
                np.copyto(target, tier_pages[tier : tier + count])
        failed: Int32Array = blocks.block_ids[~fits]
        return failed

    def _fits(self, number: int, key: bytes) -> bool:
        held = self._held[number]
        return (
            held is not None
            and held.key == key
            and held.checksum == xxh3_64_intdigest(self.memory[number])
        )


def _runs(block_ids: Int32Array, tier_block_ids: Int32Array) -> list[tuple[int, int, int]]:
    """Divides pairs of blocks into runs that are consecutive in both the KV cache and the tier, so
    that each run is one copy. A run is (first block in the KV cache, first block in the tier,
    length).
    """
    if not len(block_ids):
        return []
    breaks = np.flatnonzero((np.diff(block_ids) != 1) | (np.diff(tier_block_ids) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(block_ids)]
    return [
        (int(block_ids[start]), int(tier_block_ids[start]), end - start)
        for start, end in zip(starts, ends, strict=True)
    ]
