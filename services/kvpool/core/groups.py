"""Groups of layers: how each kind of attention holds blocks.

A group has a block table for each request. What a query may see decides which blocks a request
needs, which it may give back early, and which make a prefix hit; so each kind of attention has its
manager here, and the pool asks every one in turn. vLLM's hybrid KV-cache manager divides the work
in the same way.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.block_hash import BlockHash
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.errors import UnsupportedGroup
from services.kvpool.core.ids import BlockId


class AttentionType(enum.Enum):
    """What a layer's queries see of the past."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    STATE_SPACE = "state_space"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of layers that share a block table. `window` is in tokens, 0 for full attention."""

    attention_type: AttentionType
    block_size: int
    window: int = 0
    num_layers: int = 1


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one group, in the order of its tokens.

    The first `num_published` of them are in the index.
    """

    blocks: list[BlockId] = field(default_factory=list)
    num_published: int = 0


class FullAttentionGroup:
    """Every query sees every earlier token: a request holds all its blocks until it ends."""

    __slots__ = ("_block_size", "_group", "_pool")

    def __init__(self, group: int, block_size: int, pool: BlockPool) -> None:
        self._group = group
        self._block_size = block_size
        self._pool = pool

    def num_blocks(self, num_slots: int) -> int:
        """Blocks that hold so many token slots."""
        return -(-num_slots // self._block_size)

    def num_missing(self, table: BlockTable, num_slots: int) -> int:
        """Blocks that a table lacks to hold so many token slots."""
        return max(0, -(-num_slots // self._block_size) - len(table.blocks))

    def find_prefix(self, hashes: Sequence[BlockHash], max_hit_tokens: int) -> list[BlockId]:
        """Blocks of the longest cached prefix of whole blocks within `max_hit_tokens`."""
        return self._pool.find_prefix(self._group, hashes, max_hit_tokens // self._block_size)

    def admit(self, hits: list[BlockId]) -> BlockTable:
        """A table that holds the hits, which the caller has touched."""
        return BlockTable(hits, len(hits))

    def extend(self, table: BlockTable, num_blocks: int) -> list[BlockId]:
        """Adds so many blocks to a table; they must be free. Returns them."""
        if not num_blocks:
            return []
        blocks = self._pool.take(num_blocks)
        table.blocks += blocks
        return blocks

    def publish(self, table: BlockTable, hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Publishes the blocks of a table that lie wholly below `num_tokens` and have a hash."""
        begin = table.num_published
        end = min(num_tokens // self._block_size, len(hashes), len(table.blocks))
        if end > begin:
            self._pool.publish(self._group, hashes[begin:end], table.blocks[begin:end])
            table.num_published = end

    def free(self, table: BlockTable) -> None:
        """Gives back every block of a table."""
        self._pool.free(table.blocks, table.num_published)


def create_group(group: int, spec: GroupSpec, pool: BlockPool) -> FullAttentionGroup:
    """The manager of a group's kind of attention. Raises UnsupportedGroup, naming the field."""
    if spec.attention_type is not AttentionType.FULL:
        raise UnsupportedGroup(
            f"groups of {spec.attention_type.value} attention are not served",
            field=f"groups[{group}].attention_type",
        )
    if spec.window:
        raise UnsupportedGroup(
            f"full attention has no window, here {spec.window} tokens",
            field=f"groups[{group}].window",
        )
    return FullAttentionGroup(group, spec.block_size, pool)
