"""Manages the block tables of a KV-cache group.

A group has a block table for each request. The group's attention type decides which earlier tokens
a query attends to. Therefore it also decides which blocks a running request needs, which of its
blocks are freed, and which cached blocks are a prefix hit. Each attention type has a subclass of
`GroupManager` and a search (`prefix_search`). The coordinator calls the managers and searches of
all groups. vLLM's hybrid KV-cache manager divides the work in the same way.

Each type has one rule: `KVCacheGroup.first_seen_block` returns the first block that a request with
n computed tokens still needs. Earlier blocks are freed while the request runs, and their table
entries become the null block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import NULL_BLOCK, BlockId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, hit_block_size
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.pool_config import PoolConfig


class Need(NamedTuple):
    """The slots and tokens that a request needs for a step."""

    num_slots: int
    """Number of token slots, lookahead slots included."""
    num_tokens: int
    """Number of tokens, drafts included, that are computed at the end of the step."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one group, in the order of its tokens."""

    blocks: list[BlockId] = field(default_factory=list)
    num_published: int = 0
    """The number of leading entries that `publish` has processed. Their blocks are published (in
    the prefix index), except null entries, and entries that are in `evicted` or not in `_keeps`.
    """
    num_null: int = 0
    """The number of leading entries that are the null block."""
    shared_tail: int | None = None
    """The position of a block that must be copied before this request writes to it, because other
    requests can hit the block in its present state. None if there is no such block.
    """
    has_state: bool = False
    """Whether this request itself computed the state-space state in its last block."""
    evicted: frozenset[int] = frozenset()
    """Positions of published blocks whose hash was removed."""


@dataclass(slots=True)
class Chain:
    """The block hashes of a request, and token counts at which later requests may continue."""

    hashes: list[BlockHash] = field(default_factory=list)
    num_prompt_tokens: int = 0
    shared_prefix_boundary: int = 0
    """The length of a longer shared prefix (see `PrefixHit`), as of the last admission."""


@dataclass(frozen=True, slots=True)
class GroupHit:
    blocks: Sequence[BlockId]
    num_tokens: int
    num_computed_tokens: int
    """Number of computed tokens after the admission: of the hit, and loaded by a KV connector."""


Tables = tuple[BlockTable, ...]
"""The block tables of one request, one for each group."""

Filling = tuple[Tables, Chain, int]
"""The tables of a request, the request's hashes, and the number of tokens that may be published."""


class GroupManager:
    """Manages the block tables of one group. Each attention type has a subclass."""

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
        """Whether a hit's last block is dropped, since a draft head must compute it again."""
        self._hash_block_size = config.hash_block_size
        self._hit_block_size = hit_block_size(config.groups)
        self._alignment = config.cache_hit_alignment
        self._rounds_published = len(config.groups) > 1 and not config.has_partial_hits
        """Whether only blocks before a possible end of a hit are published."""
        self._retention_interval = config.prefix_cache_retention_interval
        self._drops_last_hit_block = bool(config.eagle_groups)
        """Whether the last block of a hit is dropped in any group."""
        self._max_admission_blocks: int | None = None
        """Limit on the free blocks that an admission requires for a whole sequence, or None."""
        self._zeroes = spec.attention_type is not AttentionType.STATE_SPACE and any(
            other.attention_type is AttentionType.STATE_SPACE for other in config.groups
        )
        """Whether new blocks must be zeroed (`take_blocks_to_zero` has the reason)."""
        self._new_blocks: list[BlockId] = []
        if config.max_in_flight_tokens is not None and config.max_model_len is not None:
            self._max_admission_blocks = spec.max_admission_blocks(
                config.max_in_flight_tokens, config.max_model_len
            )

    # Counts of blocks that decide whether a request fits

    def num_missing(self, table: BlockTable, need: Need) -> int:
        """The number of blocks that a request's table lacks for a step."""
        return max(0, -(-need.num_slots // self._block_size) - len(table.blocks))

    def num_missing_behind(self, hit: GroupHit, need: Need) -> int:
        """The number of blocks that a request needs for a step in addition to its hit."""
        return self._num_behind(hit, -(-need.num_slots // self._block_size))

    def num_reserved(self, table: BlockTable, num_slots: int) -> int:
        """The number of free blocks required for `num_slots` slots, besides the table's blocks."""
        return max(0, self._num_counted(num_slots) - len(table.blocks))

    def num_reserved_behind(self, hit: GroupHit, num_slots: int) -> int:
        """The number of free blocks required for `num_slots` slots, besides the hit's blocks."""
        return self._num_behind(hit, self._num_counted(num_slots))

    def held_hits(self, hit: GroupHit) -> Sequence[BlockId]:
        """The hit blocks that queries after the request's computed tokens still read."""
        begin, hits = self._spec.first_seen_block(hit.num_computed_tokens), hit.blocks
        return hits[begin:] if begin else hits

    def counted_hits(self, hit: GroupHit) -> Sequence[BlockId]:
        """The hit blocks that do not count as free at admission, since the request uses them."""
        return self.held_hits(hit)

    def is_stored(self, hits: Sequence[BlockId]) -> bool:  # noqa: ARG002
        """Whether a request of the current step can read the hit blocks. Blocks with keys and
        values always can, even if the current step computes them, because each layer writes keys
        and values before it reads them.
        """
        return True

    # Operations that change tables

    def begin_step(self) -> None:
        """Starts a step. From then on, blocks that earlier steps published count as stored."""

    def admit(self, hit: GroupHit) -> BlockTable:
        """Creates a table with the blocks of a hit that the request still reads."""
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
        """Returns how many tokens the blocks of the hit and of a KV connector's load cover."""
        return num_computed_tokens

    def extend_for_load(
        self, table: BlockTable, num_computed_tokens: int, *, is_async: bool
    ) -> None:
        """Adds blocks for the tokens that a KV connector loads. Blocks of an asynchronous load are
        not zeroed, since zeroing could erase loaded data.
        """
        num_blocks = -(-num_computed_tokens // self._block_size) - len(table.blocks)
        entries = self._pool.get_new_blocks(max(0, num_blocks))
        table.blocks += entries
        if self._zeroes and not is_async:
            self._new_blocks += entries

    def extend(self, table: BlockTable, need: Need) -> list[BlockId]:
        """Adds and returns the blocks that a table lacks for `need`. Enough blocks must be free."""
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
        """Publishes, for each filling, the full blocks of its tokens that have a hash."""
        for tables, chain, num_tokens in fillings:
            self._publish_one(tables[self._group], chain, self._num_publishable(num_tokens))

    def free(self, table: BlockTable) -> None:
        self._pool.free_in_order(self._group, reversed(table.blocks))

    def take_blocks_to_zero(self) -> list[BlockId]:
        """Returns the new blocks since the last call that must be zeroed before use.

        These are attention blocks of pools that also have groups with states (vLLM:
        new_block_ids_to_zero). All groups use the same memory for a block. If a block contained a
        state before, its bytes can be NaN when they are read as keys and values, and no mask hides
        NaN. Old keys and values are finite, and masks hide them.
        """
        blocks, self._new_blocks = self._new_blocks, []
        return blocks

    def num_common_blocks(self, table: BlockTable, num_requests: int) -> int:  # noqa: ARG002
        """The number of leading blocks that all requests share. 0 if blocks are freed early."""
        return 0

    def check(self, table: BlockTable, chain: Chain) -> None:  # noqa: ARG002
        assert not any(table.blocks[: table.num_null]), "a block where the null block should be"

    # Hooks and helpers of subclasses

    def _keeps(self, positions: range, boundaries: Sequence[int]) -> list[bool] | None:  # noqa: ARG002
        """For each position, whether its block is published. None means that all are published.
        `boundaries` are token counts at which later requests are likely to continue.
        """
        return None

    def _num_counted(self, num_slots: int) -> int:
        num_blocks = -(-num_slots // self._block_size)
        most = self._max_admission_blocks
        return num_blocks if most is None else min(num_blocks, most)

    def _num_behind(self, hit: GroupHit, num_blocks: int) -> int:
        num_passed = self._spec.first_seen_block(hit.num_computed_tokens)
        return max(0, num_blocks - max(len(hit.blocks), num_passed)) + self._needs_copy(hit)

    def _needs_copy(self, hit: GroupHit) -> bool:
        """Whether the hit ends inside a block, to which the request writes its next tokens."""
        return bool(hit.blocks) and hit.num_tokens % self._block_size != 0

    def _copy_shared_tail(self, table: BlockTable) -> None:
        position, table.shared_tail = table.shared_tail, None
        assert position is not None
        source, (target,) = table.blocks[position], self._pool.get_new_blocks(1)
        table.blocks[position] = target
        if self._zeroes:
            self._new_blocks.append(target)
        self._pool.copy(self._group, source, target, adds_holder_of=target)

    def _num_publishable(self, num_tokens: int) -> int:
        """Rounds `num_tokens` down, so that only blocks that a hit can use are published. The
        result is the last possible end of a hit. If the last block of a hit is dropped, the result
        is one block more, because a look-up reads the dropped block too.
        """
        if not self._rounds_published:
            return num_tokens
        aligned = num_tokens // self._alignment * self._alignment
        if self._uses_eagle and aligned:
            return min(num_tokens, aligned + self._block_size)
        return aligned

    def _publish_one(self, table: BlockTable, chain: Chain, num_tokens: int) -> range:
        """Publishes the full blocks of one table and returns the range of examined positions."""
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
        """Token counts at which a later request that shares a prefix is likely to continue."""
        boundaries = _replay_boundaries(
            chain.num_prompt_tokens, self._hit_block_size, drops_last=self._drops_last_hit_block
        )
        if chain.shared_prefix_boundary:
            boundaries.append(chain.shared_prefix_boundary)
            if self._uses_eagle:
                boundaries.append(chain.shared_prefix_boundary - self._block_size)
        return boundaries


def _replay_boundaries(
    num_prompt_tokens: int, hit_block_size: int, *, drops_last: bool
) -> list[int]:
    """Token counts at which a later request continues if its prompt equals or extends this prompt.

    An equal prompt hits at most all tokens but the last one, which must be computed again. With
    `drops_last`, a hit ends at a multiple of `hit_block_size`, and then loses its last block.
    """
    if not drops_last:
        return [num_prompt_tokens - 1]
    size = hit_block_size
    ends = {(num_prompt_tokens - 1) // size * size, num_prompt_tokens // size * size}
    return sorted({max(end - size, 0) for end in ends})
