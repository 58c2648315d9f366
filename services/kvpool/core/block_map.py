"""A map of a pool's blocks for displays: the state of each block, and the request that holds it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from services.common.pool.ids import NULL_BLOCK, BlockId, RequestKey


class BlockState(IntEnum):
    """The states of a block. Greater is more in use."""

    BLANK = 1
    """Nothing of use: it is free."""
    CACHED = 2
    """Tokens that a prompt can find: it is free until it is reused."""
    HELD = 3
    """Tokens of one request."""
    SHARED = 4
    """Tokens of several requests."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Cells, each of which stands for `blocks_per_cell` blocks in the order of their ids, without
    the null block, and shows the one in most use. `states` and `owners` are parallel; an owner is
    the holder that was admitted last, 0 without one.
    """

    blocks_per_cell: int
    states: Sequence[BlockState]
    owners: Sequence[RequestKey]
    num_blank: int
    num_cached: int
    num_held: int
    num_shared: int


def block_map(
    num_blocks: int,
    tables: Iterable[tuple[RequestKey, Sequence[BlockId]]],
    cached: Iterable[BlockId],
    shared: Iterable[BlockId],
    max_cells: int,
) -> BlockMap:
    """The map of blocks 1 .. num_blocks-1. `tables` are the blocks of each request, `cached` the
    published ones, `shared` those that several tables hold.
    """
    states = [BlockState.BLANK] * num_blocks
    owners: list[RequestKey] = [RequestKey(0)] * num_blocks
    for block in cached:
        states[block] = BlockState.CACHED
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
    )


def _busiest(states: Sequence[BlockState], first: int, length: int) -> int:
    """Index of the first state of a run that none in it exceeds."""
    if length == 1:
        return first
    return max(range(first, min(first + length, len(states))), key=states.__getitem__)
