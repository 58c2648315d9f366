"""Which new blocks of a transaction have to be cleared before they are used (vLLM:
new_block_ids_to_zero). Empty without state-space groups, which no worker has yet.

Groups of layers share the memory of a block. If some hold recurrent states, the bytes of a new
block, read as keys and values, can be NaN, which no mask hides. Without states they are old keys
and values, which are finite and masked.
"""

from collections.abc import Sequence

from services.common.ids import NULL_BLOCK, BlockId
from services.common.pool_operations import (
    Admit,
    AdmitResult,
    GroupBlocks,
    GrowResult,
    Operation,
    OperationResult,
)


def block_ids_to_zero(
    operations: Sequence[Operation], results: Sequence[OperationResult | None], block_size: int
) -> tuple[BlockId, ...]:
    """Blocks that were taken from the free queue for requests that grew or were admitted, in order.

    Hits are not among them.
    """
    taken: list[BlockId] = []
    for operation, result in zip(operations, results, strict=False):
        match operation, result:
            case _, GrowResult(groups):
                for group in groups:
                    taken += group.block_ids
            case Admit(admissions), AdmitResult(groups):
                num_hits = [item.num_hit_tokens // block_size for item in admissions]
                for group in groups:
                    taken += _behind_hits(num_hits, group)
    return tuple(block for block in taken if block != NULL_BLOCK)


def _behind_hits(num_hits: Sequence[int], group: GroupBlocks) -> list[BlockId]:
    """The blocks of each table behind its hits."""
    blocks: list[BlockId] = []
    start = 0
    for hits, count in zip(num_hits, group.num_blocks, strict=False):
        blocks += group.block_ids[start + hits : start + count]
        start += count
    return blocks
