"""Coordinates the KV-cache groups of a pool, which must agree on the length of a prefix hit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.kvpool.core.attention_managers import (
    ChunkedLocalManager,
    FullAttentionManager,
    SlidingWindowManager,
)
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.group_manager import GroupHit, GroupManager, Need, Tables
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.prefix_search import SEARCHES, FullSearch, PrefixSearch
from services.kvpool.core.state_space import state_manager

_MANAGERS: dict[AttentionType, Callable[..., GroupManager]] = {
    AttentionType.FULL: FullAttentionManager,
    AttentionType.SLIDING_WINDOW: SlidingWindowManager,
    AttentionType.CHUNKED_LOCAL: ChunkedLocalManager,
    AttentionType.STATE_SPACE: state_manager,
}


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix of a request: its blocks in each group (`tables`) and its length in tokens.
    `shared_prefix_boundary` is the length of a longer prefix that only some groups have cached, or
    0 if there is none. Another request has computed that prefix. A request that computes it again
    may publish the windows and states at the prefix's end for later requests (Marconi, MLSys 2025).
    """

    tables: list[list[BlockId]]
    num_tokens: int
    shared_prefix_boundary: int = 0


@dataclass(frozen=True, slots=True)
class _Kind:
    """Groups that are searched together because their attention type and parameters are equal."""

    groups: list[int]
    search: PrefixSearch
    drops_last: bool
    """Whether a hit's last block is dropped, since a draft head (EAGLE) must compute it again."""


class Coordinator:
    """Coordinates the groups of a pool, which are in the order of the pool's configuration."""

    def __init__(self, config: PoolConfig, pool: BlockPool) -> None:
        self._kinds = _kinds(config, pool)
        uses_eagle = {group for kind in self._kinds if kind.drops_last for group in kind.groups}
        self.groups = tuple(
            _MANAGERS[spec.attention_type](
                group, spec, pool, config, uses_eagle=group in uses_eagle
            )
            for group, spec in enumerate(config.groups)
        )
        self.is_simple = all(
            spec.attention_type is AttentionType.FULL
            and spec.block_size == config.groups[0].block_size
            for spec in config.groups
        )
        """Whether a request's tables have equal lengths, and never shrink before it finishes."""
        self._is_single = len(config.groups) == 1
        self._hash_block_size = config.hash_block_size
        first = self._kinds[0].search
        self._needs_one_round = len(self._kinds) == 2 and isinstance(first, FullSearch)

    def find_longest_cache_hit(self, chain: Sequence[BlockHash], max_tokens: int) -> PrefixHit:
        """Returns the longest hit of up to `max_tokens` tokens in a chain of hashes. The hit has a
        table for each group. Entries that the request does not read are the null block.
        """
        if self._is_single:
            kind = self._kinds[0]
            return PrefixHit(*kind.search.find(chain, max_tokens, drop_last=kind.drops_last))
        return self._agree(chain, max_tokens)

    def find_divergent_cache_hit(self, chain: Sequence[BlockHash], max_tokens: int) -> PrefixHit:
        """Returns the hit of the full-attention groups. The hits of other groups may be shorter:
        each table has the blocks of its own group's hit. If another group's hit is longer, or all
        hits are equally long, the result is the hit of `find_longest_cache_hit`. A KV connector can
        load what the other groups lack.
        """
        common = self.find_longest_cache_hit(chain, max_tokens)
        first = self._kinds[0]
        if self._is_single or not isinstance(first.search, FullSearch):
            return common
        tables: list[list[BlockId]] = [[] for _ in self.groups]
        lengths: list[int] = []
        for kind in self._kinds:
            most = max_tokens
            if kind.drops_last:
                most += kind.search.eagle_margin()
                most = min(most, len(chain) * self._hash_block_size)
            found, length = kind.search.find(chain, most, drop_last=kind.drops_last)
            lengths.append(length)
            for group, table in zip(kind.groups, found, strict=True):
                tables[group] = table
        if max(lengths) > lengths[0] or min(lengths) == lengths[0]:
            return common
        return PrefixHit(tables, lengths[0])

    def _agree(self, chain: Sequence[BlockHash], max_tokens: int) -> PrefixHit:
        """Finds the longest prefix that is a hit in all kinds of groups.

        Each kind in turn shortens the prefix to the kind's longest hit. The shorter prefix may no
        longer be a hit of an earlier kind, because a window must be cached as a whole. Therefore
        the kinds are searched round after round, until a round does not change the length. One
        round suffices if there are only full attention and one other kind.
        """
        num_known = len(chain) * self._hash_block_size
        candidate = _Candidate(chain, num_known, max_tokens, [[] for _ in self.groups])
        while True:
            before = candidate.num_tokens
            for kind in self._kinds:
                candidate.shorten(kind)
            if candidate.num_tokens >= before or self._needs_one_round:
                return candidate.hit(self._kinds)

    def num_common_blocks(self, tables: Tables, num_requests: int) -> list[int]:
        return [
            group.num_common_blocks(table, num_requests)
            for group, table in zip(self.groups, tables, strict=True)
        ]

    def remove_skipped_blocks(self, tables: Tables, num_computed_tokens: int) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            group.remove_skipped_blocks(table, num_computed_tokens)

    def admit(self, hits: Sequence[GroupHit], need: Need, num_computed_tokens: int) -> Tables:
        """Creates tables with the hits, followed by new blocks for `need`.

        Enough blocks must be free. `num_computed_tokens` counts the tokens of the hits and the
        tokens after them that a KV connector loads. Blocks are assigned in three passes over the
        groups. First all hit blocks leave the free queue, so that none of them is evicted. Then the
        blocks of loaded tokens are allocated, and last the blocks of tokens to compute.
        """
        tables = tuple(group.admit(hit) for group, hit in zip(self.groups, hits, strict=True))
        for group, hit, table in zip(self.groups, hits, tables, strict=True):
            if num_computed_tokens > hit.num_tokens:
                is_async = need.num_slots == num_computed_tokens
                end = group.end_of_load(hit, num_computed_tokens)
                group.extend_for_load(table, end, is_async=is_async)
        self.extend(tables, need)
        return tables

    def extend(self, tables: Tables, need: Need) -> None:
        """Adds the blocks that the tables lack for `need`. Enough blocks must be free."""
        for group, table in zip(self.groups, tables, strict=True):
            group.extend(table, need)


@dataclass(slots=True)
class _Candidate:
    """A prefix that `Coordinator._agree` shortens until it is a hit of all groups."""

    chain: Sequence[BlockHash]
    num_known_tokens: int
    num_tokens: int
    tables: list[list[BlockId]]
    longest: int = 0
    """The number of tokens in the longest hit that any kind has found."""
    full_lengths: dict[int, int] = field(default_factory=dict)
    """Maps the first group of each full-attention kind to the kind's hit length in tokens. Such a
    kind is searched only once, because each prefix of a full-attention hit is a hit too.
    """
    verified: set[int] = field(default_factory=set)
    """Kinds with `drops_last`, by their first group, for which the block after the prefix is known
    to be cached. A draft head (EAGLE) requires that block, which is not part of the hit.
    """

    def shorten(self, kind: _Kind) -> None:
        number = kind.groups[0]
        if number in self.full_lengths:
            self.num_tokens = min(self.num_tokens, self.full_lengths[number])
            return
        drop_last = kind.drops_last and number not in self.verified
        most = self.num_tokens
        if drop_last:
            most = min(most + kind.search.eagle_margin(), self.num_known_tokens)
        found, num_tokens = kind.search.find(self.chain, most, drop_last=drop_last)
        if drop_last:
            self.verified.add(number)
        elif num_tokens < self.num_tokens:
            self.verified.clear()
        self.num_tokens = num_tokens
        self.longest = max(self.longest, num_tokens)
        for group, table in zip(kind.groups, found, strict=True):
            self.tables[group] = table
        if isinstance(kind.search, FullSearch):
            self.full_lengths[number] = num_tokens

    def hit(self, kinds: Iterable[_Kind]) -> PrefixHit:
        for kind in kinds:
            if isinstance(kind.search, FullSearch):
                num_blocks = -(-self.num_tokens // kind.search.spec.block_size)
                for group in kind.groups:
                    del self.tables[group][num_blocks:]
        boundary = self.longest if self.longest > self.num_tokens else 0
        return PrefixHit(self.tables, self.num_tokens, boundary)


def _kinds(config: PoolConfig, pool: BlockPool) -> list[_Kind]:
    """Returns the kinds, full attention first, because its hit bounds the other kinds' hits."""
    alike: dict[KVCacheGroup, list[int]] = {}
    for group, spec in enumerate(config.groups):
        alike.setdefault(_seen_alike(spec), []).append(group)
    kinds = [
        _Kind(
            groups,
            _search(spec, groups, config, pool),
            drops_last=not config.eagle_groups.isdisjoint(groups),
        )
        for spec, groups in alike.items()
    ]
    return sorted(kinds, key=lambda kind: not isinstance(kind.search, FullSearch))


def _seen_alike(spec: KVCacheGroup) -> KVCacheGroup:
    """Copies the fields that decide which groups are searched together. Resets all other fields."""
    return KVCacheGroup(
        spec.attention_type,
        spec.block_size,
        spec.window,
        mamba_cache_mode=spec.mamba_cache_mode,
        num_speculative_blocks=spec.num_speculative_blocks,
    )


def _search(
    spec: KVCacheGroup, groups: Iterable[int], config: PoolConfig, pool: BlockPool
) -> PrefixSearch:
    return SEARCHES[spec.attention_type](
        spec,
        [pool.indexes[group] for group in groups],
        hash_block_size=config.hash_block_size,
        alignment=config.cache_hit_alignment,
    )
