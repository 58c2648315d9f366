"""Full attention: every query sees every earlier token."""

from collections.abc import Sequence

from services.common.block_hash import BlockHash
from services.common.ids import BlockId
from services.kvpool.core.group_manager import BlockTable, GroupManager


class FullAttentionManager(GroupManager):
    """A request holds all its blocks until it ends, and a hit is a cached prefix."""

    __slots__ = ()

    @property
    def frees_early(self) -> bool:
        """False."""
        return False

    def find_longest_cache_hit(self, hashes: Sequence[BlockHash], depth: int) -> list[BlockId]:
        """The longest cached prefix: found from the left, since a chain breaks only once."""
        blocks = self._pool.find_prefix(self._group, hashes, depth + self._num_dropped)
        return blocks[:-1] if self._num_dropped else blocks

    def num_common_blocks(self, table: BlockTable, num_requests: int) -> int:
        """Leading blocks of a table that all of so many requests hold."""
        return self._pool.count_held_by(num_requests, table.blocks)
