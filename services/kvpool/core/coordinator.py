"""What the groups of a pool decide together: how long a prefix hit is."""

from collections.abc import Sequence

from services.common.block_hash import BlockHash
from services.common.ids import BlockId
from services.common.kv_cache_groups import AttentionType
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.group_manager import BlockTable, FullAttentionManager, GroupManager
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.state_space import StateSpaceManager

Tables = tuple[BlockTable, ...]

_MANAGERS: dict[AttentionType, type[GroupManager]] = {
    AttentionType.FULL: FullAttentionManager,
    AttentionType.SLIDING_WINDOW: GroupManager,
    AttentionType.CHUNKED_LOCAL: GroupManager,
    AttentionType.STATE_SPACE: StateSpaceManager,
}


class Coordinator:
    """The groups of a pool, in the order of its configuration."""

    def __init__(self, config: PoolConfig, pool: BlockPool) -> None:
        self.groups = tuple(
            _MANAGERS[spec.attention_type](
                group, spec, pool, drop_last_hit_block=config.drop_last_hit_block
            )
            for group, spec in enumerate(config.groups)
        )
        self.frees_early = any(group.frees_early for group in self.groups)
        # Full attention first: it looks from the left, and bounds what the others look through.
        self._order = sorted(
            range(len(self.groups)), key=lambda group: self.groups[group].frees_early
        )

    def find_longest_cache_hit(self, hashes: Sequence[BlockHash]) -> list[list[BlockId]]:
        """The longest hit among prefixes of a chain of block hashes, as a table for each group.
        All tables are equally long; entries that need not be read are the null block.

        A hit of one group may be too long for another, and the next shorter hit of the other may
        not be one of the first, since a window has to be cached as a whole. So each group in turn
        shortens the hit to one of its own, until a whole round leaves its length as it is. The
        length only shrinks, and never below a hit of all groups.
        """
        hits: list[list[BlockId]] = [[] for _ in self.groups]
        depth, shrunk = len(hashes), True
        while shrunk:
            shrunk = False
            for group in self._order:
                if len(hits[group]) != depth:
                    hits[group] = self.groups[group].find_longest_cache_hit(hashes, depth)
                    shrunk = shrunk or len(hits[group]) < depth
                    depth = len(hits[group])
        return hits

    def num_common_blocks(self, tables: Tables, num_requests: int) -> list[int]:
        """For each group, the leading blocks of one request's tables that all requests hold."""
        return [
            group.num_common_blocks(table, num_requests)
            for group, table in zip(self.groups, tables, strict=True)
        ]

    def remove_skipped_blocks(
        self, tables: Tables, hashes: Sequence[BlockHash], num_computed_tokens: int
    ) -> None:
        """Frees, group after group, what no query from `num_computed_tokens` on can see."""
        for group, table in zip(self.groups, tables, strict=True):
            group.remove_skipped_blocks(table, hashes, num_computed_tokens)

    def admit(self, hits: list[list[BlockId]], num_computed_tokens: int, num_slots: int) -> Tables:
        """Tables that hold the hits and then new blocks for so many slots, which must be free. What
        is computed beyond the hits is loaded from elsewhere.

        Every hit is taken out of the free queue before new blocks are, so that none is evicted;
        then all groups take the blocks to load into, then those to compute.
        """
        tables = tuple(
            group.admit(blocks, num_computed_tokens)
            for group, blocks in zip(self.groups, hits, strict=True)
        )
        self.extend(tables, num_computed_tokens)
        self.extend(tables, num_slots)
        return tables

    def extend(self, tables: Tables, num_slots: int) -> None:
        """Adds what tables lack to hold so many slots, group after group; it must be free."""
        for group, table in zip(self.groups, tables, strict=True):
            group.extend(table, num_slots)
