"""A map of a pool's blocks for displays: the state of each block and the request that uses it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

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


def block_map(
    num_blocks: int,
    tables: Iterable[tuple[RequestKey, Sequence[BlockId]]],
    cached: Iterable[BlockId],
    shared: Iterable[BlockId],
    retained: Iterable[BlockId],
    max_cells: int,
) -> BlockMap:
    """Returns the map of blocks 1 .. num_blocks-1. `tables` has the blocks of each request,
    `cached` the blocks with a hash, `shared` the blocks that are in several tables, and `retained`
    the blocks in state RETAINED.
    """
    states = [BlockState.BLANK] * num_blocks
    owners: list[RequestKey] = [RequestKey(0)] * num_blocks
    for block in cached:
        states[block] = BlockState.CACHED
    for block in retained:
        states[block] = BlockState.RETAINED
    for request, blocks in tables:
        for block in blocks:
            owners[block] = request
            states[block] = BlockState.HELD
    for block in shared:
        states[block] = BlockState.SHARED
    del states[NULL_BLOCK], owners[NULL_BLOCK]
    per_cell = -(-(num_blocks - 1) // max_cells)
    cells = [_busiest(states, first, per_cell) for first in range(0, num_blocks - 1, per_cell)]
    return BlockMap(
        blocks_per_cell=per_cell,
        states=[states[block] for block in cells],
        owners=[owners[block] for block in cells],
        num_blank=states.count(BlockState.BLANK),
        num_cached=states.count(BlockState.CACHED),
        num_held=states.count(BlockState.HELD),
        num_shared=states.count(BlockState.SHARED),
        num_retained=states.count(BlockState.RETAINED),
    )


def _busiest(states: Sequence[BlockState], first: int, length: int) -> int:
    if length == 1:
        return first
    return max(range(first, min(first + length, len(states))), key=states.__getitem__)
