"""How a group of layers holds blocks.

A group has a block table for each request. What a query can see decides which blocks a request
needs, which are freed while it runs, and which make a prefix hit; so each kind of attention has its
manager and its search (`prefix_search`), and a coordinator calls them all. vLLM's hybrid KV-cache
manager divides the work in the same way.

Everything follows from one rule of the kind, `KVCacheGroup.first_seen_block`: a request that has
computed n tokens needs the blocks from there on and no earlier one. Earlier ones are freed while it
runs. Table entries that hold nothing name the null block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import NULL_BLOCK, BlockId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, hit_block_size
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.retention import replay_boundaries


class Need(NamedTuple):
    """The slots and tokens that a request needs for a step."""

    num_slots: int
    """Token slots, those of lookahead included."""
    num_tokens: int
    """Tokens that are computed when the step ends, drafts included: those that states cover."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one group, in the order of its tokens."""

    blocks: list[BlockId] = field(default_factory=list)
    num_published: int = 0
    """The number of leading entries that were published, except for those that are null, not worth
    keeping, or in `evicted`.
    """
    num_null: int = 0
    """The number of leading entries that are the null block."""
    shared_tail: int | None = None
    """The entry that the request must get a copy of before it writes to it, if there is one: others
    find its block by a prefix that ends inside.
    """
    has_state: bool = False
    """Whether the last blocks hold states of this request alone, and none of a hit."""
    evicted: frozenset[int] = frozenset()
    """Published entries whose hash was taken away."""


@dataclass(slots=True)
class Chain:
    """The hashes of a request, and the tokens at which later requests may hit its prefix."""

    hashes: list[BlockHash] = field(default_factory=list)
    num_prompt_tokens: int = 0
    shared_prefix_boundary: int = 0
    """See `PrefixHit`; of its last admission."""


@dataclass(frozen=True, slots=True)
class GroupHit:
    """A prefix hit in one group."""

    blocks: Sequence[BlockId]
    num_tokens: int
    num_computed_tokens: int
    """Tokens that the group moves on to: those of the hit, and those loaded from elsewhere behind
    it.
    """


Tables = tuple[BlockTable, ...]
"""The tables of one request, one for each group."""

Filling = tuple[Tables, Chain, int]
"""The tables of a request, its hashes, and the number of tokens stored."""


class GroupManager:
    """The tables of one group. Each kind of attention has a subclass."""

    def __init__(
        self,
        group: int,
        spec: KVCacheGroup,
        pool: BlockPool,
        config: PoolConfig,
        *,
        uses_eagle: bool,
    ) -> None:
        self._group = group
        self._spec = spec
        self._block_size = spec.block_size
        self._pool = pool
        self._index = pool.indexes[group]
        self._uses_eagle = uses_eagle
        """Whether the last block of a hit is dropped."""
        self._hash_block_size = config.hash_block_size
        self._hit_block_size = hit_block_size(config.groups)
        self._alignment = config.cache_hit_alignment
        self._rounds_published = len(config.groups) > 1 and not config.has_partial_hits
        """Whether only blocks up to where hits can end are published."""
        self._retention_interval = config.prefix_cache_retention_interval
        self._drops_last_hit_block = bool(config.eagle_groups)
        """Whether the last block of a hit is dropped in any group."""
        self._max_admission_blocks: int | None = None
        """Most blocks that an admission counts for a request; None: all that it needs."""
        self._zeroes = spec.attention_type is not AttentionType.STATE_SPACE and any(
            other.attention_type is AttentionType.STATE_SPACE for other in config.groups
        )
        """Whether new blocks must be cleared: see `take_blocks_to_zero`."""
        self._new_blocks: list[BlockId] = []
        if config.max_in_flight_tokens is not None and config.max_model_len is not None:
            self._max_admission_blocks = spec.max_admission_blocks(
                config.max_in_flight_tokens, config.max_model_len
            )

    # What fits

    def num_missing(self, table: BlockTable, need: Need) -> int:
        """Blocks that a request lacks for a step."""
        return max(0, -(-need.num_slots // self._block_size) - len(table.blocks))

    def num_missing_behind(self, hit: GroupHit, need: Need) -> int:
        """Blocks that a request lacks besides its hits."""
        return self._num_behind(hit, -(-need.num_slots // self._block_size))

    def num_reserved(self, table: BlockTable, num_slots: int) -> int:
        """Blocks that an admission counts for a whole sequence, besides those that are held."""
        return max(0, self._num_counted(num_slots) - len(table.blocks))

    def num_reserved_behind(self, hit: GroupHit, num_slots: int) -> int:
        """Blocks that an admission counts for a whole sequence, besides its hits."""
        return self._num_behind(hit, self._num_counted(num_slots))

    def held_hits(self, hit: GroupHit) -> Sequence[BlockId]:
        """The hit blocks that the request needs to go on after its computed tokens."""
        begin, hits = self._spec.first_seen_block(hit.num_computed_tokens), hit.blocks
        return hits[begin:] if begin else hits

    def counted_hits(self, hit: GroupHit) -> Sequence[BlockId]:
        """The hit blocks that an admission counts as taken from the free blocks."""
        return self.held_hits(hit)

    def is_stored(self, hits: Sequence[BlockId]) -> bool:  # noqa: ARG002
        """Whether a request of this step can read the hits. Layers write keys and values before
        they read, so it does not matter if the same step computes them.
        """
        return True

    # Changes

    def begin_step(self) -> None:
        """A step begins: blocks that were published before it are stored."""

    def admit(self, hit: GroupHit) -> BlockTable:
        """A table that holds those of the hits that are needed."""
        num_null = self._spec.first_seen_block(hit.num_computed_tokens)
        held = self.held_hits(hit)
        self._pool.touch(held)
        blocks = [NULL_BLOCK] * num_null
        blocks += held
        table = BlockTable(blocks, len(blocks), num_null)
        if held and hit.num_tokens % self._block_size:
            table.shared_tail = table.num_published = hit.num_tokens // self._block_size
        return table

    def end_of_load(self, hit: GroupHit, num_computed_tokens: int) -> int:  # noqa: ARG002
        """The number of tokens whose blocks are loaded, of `num_computed_tokens`."""
        return num_computed_tokens

    def extend_for_load(
        self, table: BlockTable, num_computed_tokens: int, *, is_async: bool
    ) -> None:
        """Adds the blocks that tokens are loaded into from elsewhere. Those that are loaded between
        steps are not cleared: that could come after the load.
        """
        num_blocks = -(-num_computed_tokens // self._block_size) - len(table.blocks)
        entries = self._pool.get_new_blocks(max(0, num_blocks))
        table.blocks += entries
        if self._zeroes and not is_async:
            self._new_blocks += entries

    def extend(self, table: BlockTable, need: Need) -> list[BlockId]:
        """Adds the blocks that a table lacks for the need, which must be free. Returns them."""
        if table.shared_tail is not None:
            self._copy_shared_tail(table)
        num_blocks = -(-need.num_slots // self._block_size) - len(table.blocks)
        if num_blocks <= 0:
            return []
        entries = self._pool.get_new_blocks(num_blocks)
        table.blocks += entries
        if self._zeroes:
            self._new_blocks += entries
        return entries

    def remove_skipped_blocks(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Frees the blocks that no query from `num_computed_tokens` on can see."""
        end = min(self._spec.first_seen_block(num_computed_tokens), len(table.blocks))
        begin = table.num_null
        if end > begin:
            freed = table.blocks[begin:end]
            table.blocks[begin:end] = [NULL_BLOCK] * (end - begin)
            table.num_null = end
            self._pool.free_in_order(self._group, freed[::-1])

    def publish(self, fillings: Iterable[Filling]) -> None:
        """Publishes the blocks that the fillings' tokens fill and that have a hash."""
        for tables, chain, num_tokens in fillings:
            self._publish_one(tables[self._group], chain, self._num_publishable(num_tokens))

    def free(self, table: BlockTable) -> None:
        """Frees every block of a table."""
        self._pool.free_in_order(self._group, reversed(table.blocks))

    def take_blocks_to_zero(self) -> list[BlockId]:
        """New blocks since the last call that must be cleared before they are used: those of
        attention, where other groups hold states (vLLM: new_block_ids_to_zero).

        Groups share the memory of a block. The bytes of a state, read as keys and values, can be
        NaN, which no mask hides; old keys and values are finite and masked.
        """
        blocks, self._new_blocks = self._new_blocks, []
        return blocks

    def num_common_blocks(self, table: BlockTable, num_requests: int) -> int:  # noqa: ARG002
        """Leading blocks of a table that all requests hold; 0 if blocks are freed early."""
        return 0

    def check(self, table: BlockTable, chain: Chain) -> None:  # noqa: ARG002
        """Checks the invariants of a table. Raises AssertionError."""
        assert not any(table.blocks[: table.num_null]), "a block where the null block should be"

    # For subclasses

    def _keeps(self, positions: range, boundaries: Sequence[int]) -> list[bool] | None:  # noqa: ARG002
        """Which of the blocks at the positions are worth being found; None: all.
        `boundaries` are numbers of tokens where later requests are likely to continue.
        """
        return None

    def _num_counted(self, num_slots: int) -> int:
        """Blocks of `num_slots`, up to the most that an admission counts."""
        num_blocks = -(-num_slots // self._block_size)
        most = self._max_admission_blocks
        return num_blocks if most is None else min(num_blocks, most)

    def _num_behind(self, hit: GroupHit, num_blocks: int) -> int:
        num_passed = self._spec.first_seen_block(hit.num_computed_tokens)
        return max(0, num_blocks - max(len(hit.blocks), num_passed)) + self._needs_copy(hit)

    def _needs_copy(self, hit: GroupHit) -> bool:
        """Whether the hit ends inside a block, in which the request goes on."""
        return bool(hit.blocks) and hit.num_tokens % self._block_size != 0

    def _copy_shared_tail(self, table: BlockTable) -> None:
        """Gives the request a copy of the block at its shared tail, which it goes on to write."""
        position, table.shared_tail = table.shared_tail, None
        assert position is not None
        source, (target,) = table.blocks[position], self._pool.get_new_blocks(1)
        table.blocks[position] = target
        if self._zeroes:
            self._new_blocks.append(target)
        self._pool.copy(self._group, source, target, adds_holder_of=target)

    def _num_publishable(self, num_tokens: int) -> int:
        """`num_tokens` rounded down to where hits can end. If hits drop their last block, a look-up
        reads one block more, which is included.
        """
        if not self._rounds_published:
            return num_tokens
        aligned = num_tokens // self._alignment * self._alignment
        if self._uses_eagle and aligned:
            return min(num_tokens, aligned + self._block_size)
        return aligned

    def _publish_one(self, table: BlockTable, chain: Chain, num_tokens: int) -> range:
        """Publishes the full blocks of one table; returns the entries that it looked at."""
        size, unit = self._block_size, self._hash_block_size
        begin, end = table.num_published, min(num_tokens, len(chain.hashes) * unit) // size
        end = min(end, len(table.blocks))
        if begin >= end:
            return range(0)
        table.num_published = end
        kept = self._keeps(range(begin, end), self._boundaries(chain))
        positions = [
            position
            for position in range(max(begin, table.num_null), end)
            if table.blocks[position] and (kept is None or kept[position - begin])
        ]
        for position in positions:
            tokens = (position + 1) * size
            self._pool.publish_whole(
                self._group, chain.hashes[tokens // unit - 1], table.blocks[position], tokens
            )
        return range(begin, end)

    def _boundaries(self, chain: Chain) -> list[int]:
        """Numbers of tokens where a later request that shares a prefix is likely to continue."""
        boundaries = replay_boundaries(
            chain.num_prompt_tokens, self._hit_block_size, drops_last=self._drops_last_hit_block
        )
        if chain.shared_prefix_boundary:
            boundaries.append(chain.shared_prefix_boundary)
            if self._uses_eagle:
                boundaries.append(chain.shared_prefix_boundary - self._block_size)
        return boundaries
