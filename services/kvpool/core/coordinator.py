"""What the groups of a pool decide together: how long a prefix hit is.

As in vLLM there are three kinds. Without prefix caching there are no hits; with one group its hit
is the hit; and with several the hit is the longest one that all of them can use.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from services.common.block_hash import BlockHash
from services.common.ids import BlockId
from services.common.kv_cache_groups import AttentionType, KVCacheGroup
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.errors import UnsupportedGroup
from services.kvpool.core.full_attention import FullAttentionManager
from services.kvpool.core.group_manager import BlockTable, GroupManager
from services.kvpool.core.local_attention import LocalAttentionManager
from services.kvpool.core.state_space import StateSpaceManager

Tables = tuple[BlockTable, ...]


class Coordinator(ABC):
    """The groups of a pool, in the order in which it was given them."""

    def __init__(self, groups: Sequence[GroupManager]) -> None:
        self.groups = tuple(groups)
        self.frees_early = any(group.frees_early for group in groups)

    @abstractmethod
    def find_longest_cache_hit(self, hashes: Sequence[BlockHash]) -> list[list[BlockId]]:
        """The longest hit among prefixes of a chain of block hashes, as a table for each group.

        All tables are equally long; entries that need not be read are the null block.
        """

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

    def admit(self, hits: list[list[BlockId]], num_slots: int) -> Tables:
        """Tables that hold the hits and then new blocks for so many slots, which must be free.

        Every hit is taken out of the free queue before new blocks are, so that none is evicted.
        """
        tables = tuple(group.admit(blocks) for group, blocks in zip(self.groups, hits, strict=True))
        for group, table in zip(self.groups, tables, strict=True):
            group.extend(table, num_slots)
        return tables


class NoPrefixCacheCoordinator(Coordinator):
    """Groups without prefix caching: nothing is found, and nothing is shared."""

    def find_longest_cache_hit(self, hashes: Sequence[BlockHash]) -> list[list[BlockId]]:  # noqa: ARG002
        """No hit."""
        return [[] for _ in self.groups]

    def num_common_blocks(self, tables: Tables, num_requests: int) -> list[int]:  # noqa: ARG002
        """0 for each group, even if only one request runs."""
        return [0 for _ in self.groups]


class UnitaryCoordinator(Coordinator):
    """One group: its hit is the hit."""

    def find_longest_cache_hit(self, hashes: Sequence[BlockHash]) -> list[list[BlockId]]:
        """The longest hit of the only group."""
        (group,) = self.groups
        return [group.find_longest_cache_hit(hashes, len(hashes))]


class HybridCoordinator(Coordinator):
    """Several groups: the longest hit on which all of them agree.

    A hit of one group may be too long for another, and the next shorter hit of the other may not be
    one of the first, since a window has to be cached as a whole. So each group in turn shortens the
    hit to one of its own, until a whole round leaves its length as it is. The length only shrinks,
    and never below a hit of all groups.
    """

    def __init__(self, groups: Sequence[GroupManager]) -> None:
        super().__init__(groups)
        # Full attention first: it looks from the left, and bounds what the others look through.
        self._order = sorted(
            range(len(self.groups)), key=lambda group: self.groups[group].frees_early
        )

    def find_longest_cache_hit(self, hashes: Sequence[BlockHash]) -> list[list[BlockId]]:
        """The fixed point."""
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


def create_coordinator(
    specs: Sequence[KVCacheGroup],
    blocks: BlockPool,
    *,
    enable_prefix_caching: bool,
    drop_last_hit_block: bool,
) -> Coordinator:
    """The groups of a pool. Raises UnsupportedGroup, naming the field."""
    groups = [
        _create_group(group, spec, blocks, drop_last_hit_block=drop_last_hit_block)
        for group, spec in enumerate(specs)
    ]
    if not enable_prefix_caching:
        return NoPrefixCacheCoordinator(groups)
    return UnitaryCoordinator(groups) if len(groups) == 1 else HybridCoordinator(groups)


def _create_group(
    group: int, spec: KVCacheGroup, blocks: BlockPool, *, drop_last_hit_block: bool
) -> GroupManager:
    def refuse(text: str, field: str) -> UnsupportedGroup:
        return UnsupportedGroup(text, field=f"groups[{group}].{field}")

    match spec.attention_type:
        case AttentionType.FULL:
            if spec.window:
                raise refuse(f"full attention has no window, here {spec.window} tokens", "window")
            return FullAttentionManager(
                group, spec, blocks, drop_last_hit_block=drop_last_hit_block
            )
        case AttentionType.SLIDING_WINDOW:
            if spec.window < 2:
                raise refuse(
                    f"a sliding window of {spec.window} tokens shows nothing of the past", "window"
                )
            return LocalAttentionManager(
                group, spec, blocks, drop_last_hit_block=drop_last_hit_block
            )
        case AttentionType.CHUNKED_LOCAL:
            if spec.window < 1 or spec.window % spec.block_size:
                raise refuse(
                    f"chunks of {spec.window} tokens are no whole blocks of {spec.block_size}",
                    "window",
                )
            if drop_last_hit_block:
                raise refuse(
                    "hits of chunked local attention cannot drop their last block", "attention_type"
                )
            return LocalAttentionManager(group, spec, blocks)
        case AttentionType.STATE_SPACE:
            if spec.window:
                raise refuse(
                    f"state-space layers have no window, here {spec.window} tokens", "window"
                )
            return StateSpaceManager(group, spec, blocks)
