"""The tier of host memory to which the workers of a world (a simulated replica) offload KV blocks.
It follows the rules of `services.worker.options.tier.kv_tier.KVTier`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.pool.ids import BlockId
from services.scheduler.core.kv_transfer import (
    NO_RESULTS,
    BlockTransfer,
    ConnectorLoad,
    KVTransferResults,
)
from tests.scheduler.paged_cache import Contents, PagedCache


@dataclass(slots=True)
class TierBlock:
    """A block of the tier: its key and contents. The contents count as wrong if `is_damaged`."""

    key: bytes
    contents: Contents
    is_damaged: bool = False


@dataclass(slots=True)
class _Load:
    """A load that has not ended. It ends with the output of the step after `num_steps` more."""

    load: ConnectorLoad
    num_steps: int
    is_copied: bool = False
    invalid: list[BlockId] = field(default_factory=list)


class WorldTier:
    """Stores blocks before their step writes to the cache. A load begins with its step, and ends
    with the output of this step or of a later one. Some loads copy their blocks when they begin,
    others when they end. Blocks that are damaged or have another key are not copied.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks: list[TierBlock | None] = [None] * num_blocks
        self._loads: list[_Load] = []

    def block(self, number: int) -> TierBlock | None:
        return self._blocks[number]

    def store(self, stores: Sequence[BlockTransfer], cache: PagedCache) -> None:
        """Copies blocks from the cache to the tier."""
        for store in stores:
            self._blocks[store.tier_block] = TierBlock(store.key, cache.contents(store.block))

    def begin_loads(self, loads: Sequence[ConnectorLoad], cache: PagedCache) -> None:
        """Begins to copy blocks from the tier to the cache."""
        for number, begun in enumerate(loads, start=len(self._loads)):
            load = _Load(begun, num_steps=(begun.request + number) % 4)
            self._loads.append(load)
            if begun.request % 2:
                self._copy(load, cache)

    def end_step(self, cache: PagedCache) -> KVTransferResults:
        """Ends a step. Returns the results of the loads that end in the step."""
        ended = [load for load in self._loads if not load.num_steps]
        self._loads = [load for load in self._loads if load.num_steps]
        for load in self._loads:
            load.num_steps -= 1
        if not ended:
            return NO_RESULTS
        for load in ended:
            if not load.is_copied:
                self._copy(load, cache)
        return KVTransferResults(
            finished_recving=[load.load.request for load in ended],
            invalid_block_ids=[block for load in ended for block in load.invalid],
        )

    def damage(self, number: int) -> None:
        """Damages every second block."""
        for block in filter(None, self._blocks[number % 2 :: 2]):
            block.is_damaged = True

    def reset(self) -> None:
        """Drops all loads, as when the workers begin with an empty batch (a new generation)."""
        self._loads.clear()

    def clear(self) -> None:
        """Drops all loads and blocks, as at the start of new worker processes."""
        self._loads.clear()
        self._blocks = [None] * len(self._blocks)

    def _copy(self, load: _Load, cache: PagedCache) -> None:
        load.is_copied = True
        for transfer in load.load.blocks:
            held = self._blocks[transfer.tier_block]
            if held is None or held.is_damaged or held.key != transfer.key:
                load.invalid.append(transfer.block)
                cache.garble([transfer.block])
            else:
                cache.fill(transfer.block, held.contents)
