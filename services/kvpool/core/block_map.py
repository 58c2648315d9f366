"""A map of a pool's blocks for displays: the state of each block and the request that uses it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from services.common.pool.ids import NULL_BLOCK, BlockId, RequestKey


class BlockState(IntEnum):
    """The states of a block, ordered by use: a greater value means more use."""

    BLANK = 1
    """The block is free and has no hash."""
    CACHED = 2
    """The block is free and has a hash: a prompt can hit it until the block is reused."""
    RETAINED = 3
    """The block is free but kept for an expected request. It is reused after cached blocks."""
    HELD = 4
    """The block is in the block table of one request."""
    SHARED = 5
    """The block is in the block tables of several requests."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The blocks of a pool in order of their ids, without the null block, as a list of cells. Each
    cell stands for `blocks_per_cell` blocks and shows the block with the greatest state. `states`
    and `owners` have one item for each cell. An owner is the request admitted last among those that
    use the block, or 0 if the block is free.
    """

    blocks_per_cell: int
    states: Sequence[BlockState]
    owners: Sequence[RequestKey]
    num_blank: int
    num_cached: int
    num_held: int
    num_shared: int
    num_retained: int


@dataclass(frozen=True, slots=True)
class BlockUse:
    """A copy of the use of a pool's blocks, from which any thread can make a map."""

    num_blocks: int
    tables: Sequence[tuple[RequestKey, Sequence[BlockId]]]
    """The blocks of each request, in order of admission."""
    cached: Sequence[BlockId]
    """The blocks with a hash."""
    shared: Sequence[BlockId]
    """The blocks that are in several tables."""
    retained: Sequence[BlockId] = ()
    """The blocks in state RETAINED."""


def block_map(use: BlockUse, max_cells: int) -> BlockMap:
    """Returns the map of blocks 1 .. num_blocks-1. It is slow for a large pool."""
    states = bytearray([BlockState.BLANK]) * use.num_blocks
    states[NULL_BLOCK] = 0
    in_tables = (blocks for _, blocks in use.tables)
    for state, blocks in (
        (BlockState.CACHED, use.cached),
        (BlockState.RETAINED, use.retained),
        (BlockState.HELD, chain.from_iterable(in_tables)),
        (BlockState.SHARED, use.shared),
    ):
        number = int(state)
        for block in blocks:
            states[block] = number
    per_cell = -(-(use.num_blocks - 1) // max_cells)
    cells = [_busiest(states, first, per_cell) for first in range(1, use.num_blocks, per_cell)]
    owners: dict[int, RequestKey] = {}
    shown = set(cells)
    for request, blocks in use.tables:
        owners |= dict.fromkeys(shown.intersection(blocks), request)
    return BlockMap(
        blocks_per_cell=per_cell,
        states=[BlockState(states[block]) for block in cells],
        owners=[owners.get(block, RequestKey(0)) for block in cells],
        num_blank=states.count(BlockState.BLANK),
        num_cached=states.count(BlockState.CACHED),
        num_held=states.count(BlockState.HELD),
        num_shared=states.count(BlockState.SHARED),
        num_retained=states.count(BlockState.RETAINED),
    )


def _busiest(states: bytearray, first: int, length: int) -> int:
    end = first + length
    return states.index(max(states[first:end]), first, end)
