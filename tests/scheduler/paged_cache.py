"""The cache of the paged model: blocks that groups of layers write, and what they read of them.

A block holds what was last written to it, by whichever group it belonged to then. What a group
reads is what its kind of attention sees: everything, a window, a chunk, or the state that the step
before left. Each value names the group, so that a block that is in two hands shows at once.
"""

from collections.abc import Iterable, Sequence

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import BlockCopy

Tables = Sequence[Sequence[int]]
"""The block table of a request in each group."""

Contents = dict[int | str, tuple[int, int]]
"""What a block holds: by position in it, or for a state, the group that wrote it and a digest."""

_STATE = "state"


class PagedCache:
    """Keys and values, one digest a position, and states, one digest a block."""

    def __init__(
        self, block_size: int, groups: Sequence[KVCacheGroup] = (), *, follows_states: bool = True
    ) -> None:
        """`follows_states`: whether it keeps states. After a draft there is a state for each, in
        blocks of their own, which it does not know.
        """
        self._follows_states = follows_states
        self._groups = groups or [KVCacheGroup(AttentionType.FULL, block_size)]
        self._blocks: dict[int, Contents] = {}

    def zero(self, block_ids: Iterable[int]) -> None:
        """Forgets what blocks hold."""
        for block in block_ids:
            self._blocks.pop(block, None)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copies blocks, in order."""
        for copy in copies:
            self._blocks[copy.target] = dict(self._blocks.get(copy.source, {}))

    def is_held(self, contents: Contents, group: int, position: int, digest: int) -> bool:
        """Whether a block of a group with these contents holds what a position stores; of states,
        the last position of the block that was computed.
        """
        spec = self._groups[group]
        is_state = spec.attention_type is AttentionType.STATE_SPACE
        return contents.get(_STATE if is_state else position % spec.block_size) == (group, digest)

    def contents(self, block: int) -> Contents:
        """What a block holds now."""
        return dict(self._blocks.get(block, {}))

    def fill(self, block: int, contents: Contents) -> None:
        """Replaces what a block holds."""
        self._blocks[block] = dict(contents)

    def load(
        self, tables: Tables, digests: Sequence[int], start: int, end: int, state_end: int
    ) -> None:
        """Stores the positions from `start` to `end` as they were stored elsewhere, in every group;
        of states the one after `state_end` tokens. Whole blocks are written, also the last one.
        """
        for group, (spec, table) in enumerate(zip(self._groups, tables, strict=True)):
            positions = range(start, end)
            if spec.attention_type is AttentionType.STATE_SPACE:
                positions = range(max(0, state_end - 1), state_end)
            for position in positions:
                block = table[position // spec.block_size]
                if block:
                    self._blocks.get(block, {}).pop(_STATE, None)
                    self._store(group, block, position, digests[position])

    def garble(self, blocks: Iterable[int]) -> None:
        """Stores in blocks what belongs to no sequence."""
        for block in blocks:
            self._blocks[block] = {}

    def read_states(self, tables: Tables, digests: Sequence[int], start: int) -> None:
        """Checks the states from which a step goes on, in every group that has them. All of a
        step's are read before any is written.
        """
        for group, (spec, table) in enumerate(zip(self._groups, tables, strict=True)):
            if spec.attention_type is AttentionType.STATE_SPACE and start and self._follows_states:
                held = self._block(spec, table, start - 1).get(_STATE)
                assert held == (group, digests[start - 1]), f"no state after {start} tokens"

    def write(self, tables: Tables, digests: Sequence[int], start: int, end: int) -> None:
        """Stores what the positions from `start` to `end` hold, in every group."""
        for group, (spec, table) in enumerate(zip(self._groups, tables, strict=True)):
            assert end <= len(table) * spec.block_size, "tokens without a slot in the cache"
            if spec.attention_type is AttentionType.STATE_SPACE:
                if self._follows_states:
                    self._block(spec, table, end - 1)
                    block_id = table[(end - 1) // spec.block_size]
                    self._store(group, block_id, end - 1, digests[end - 1])
                continue
            for position in range(start, end):
                block = self._block(spec, table, position)
                assert _STATE not in block, "a block that held a state was not zeroed"
                block[position % spec.block_size] = group, digests[position]

    def read(self, tables: Tables, digests: Sequence[int], start: int, end: int) -> None:
        """Checks what the queries from `start` to `end` see, in every group."""
        for group, (spec, table) in enumerate(zip(self._groups, tables, strict=True)):
            for position in range(_first_seen(spec, start), end):
                held = self._block(spec, table, position).get(position % spec.block_size)
                assert held == (group, digests[position]), (
                    f"position {position} of group {group} holds another sequence"
                )

    def _store(self, group: int, block: int, position: int, digest: int) -> None:
        held = self._blocks.setdefault(block, {})
        if self._groups[group].attention_type is AttentionType.STATE_SPACE:
            held.clear()
            held[_STATE] = group, digest
        else:
            held[position % self._groups[group].block_size] = group, digest

    def _block(self, spec: KVCacheGroup, table: Sequence[int], position: int) -> Contents:
        block = table[position // spec.block_size]
        assert block != 0, f"position {position} lies in the null block"
        return self._blocks.setdefault(block, {})


def _first_seen(spec: KVCacheGroup, query: int) -> int:
    """The first position that a query sees; of what precedes a state, none."""
    match spec.attention_type:
        case AttentionType.FULL:
            return 0
        case AttentionType.SLIDING_WINDOW:
            return max(0, query - spec.window + 1)
        case AttentionType.CHUNKED_LOCAL:
            return query - query % spec.window
        case AttentionType.STATE_SPACE:
            return 1 << 62
