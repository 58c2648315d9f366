"""The simulated KV cache of the paged model (tests/scheduler/paged_model.py).

For each position of a block, the cache stores the last written value and the KV-cache group that
wrote it, so that a block with two owners is detected. A group reads the positions that its kind of
attention sees: all, a window, or a chunk. A group of recurrent states reads the state after the
previous step.
"""

from collections.abc import Iterable, Sequence

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import BlockCopy

Tables = Sequence[Sequence[int]]
"""The block tables of a request, one for each KV-cache group."""

Contents = dict[int | str, tuple[int, int]]
"""A block's contents: a map from positions (or "state") to pairs of group and digest."""

_STATE = "state"
EMPTY = 0
"""The digest of positions that belong to no sequence."""


class PagedCache:
    """Stores a digest for a position's keys and values, and one for a block's recurrent state."""

    def __init__(
        self, block_size: int, groups: Sequence[KVCacheGroup] = (), *, follows_states: bool = True
    ) -> None:
        """Without `follows_states`, recurrent states are neither stored nor checked. Tests with
        drafts need this, because workers then store the state after each draft in a block of its
        own, which this cache does not simulate.
        """
        self._follows_states = follows_states
        self._groups = groups or [KVCacheGroup(AttentionType.FULL, block_size)]
        self._blocks: dict[int, Contents] = {}

    def zero(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            self._blocks.pop(block, None)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            self._blocks[copy.target] = dict(self._blocks.get(copy.source, {}))

    def is_held(self, contents: Contents, group: int, position: int, digest: int) -> bool:
        """Whether a group's block with these contents has `digest` as the value of a position. For
        recurrent states, this is the last computed position of the block.
        """
        spec = self._groups[group]
        is_state = spec.attention_type is AttentionType.STATE_SPACE
        return contents.get(_STATE if is_state else position % spec.block_size) == (group, digest)

    def contents(self, block: int) -> Contents:
        return dict(self._blocks.get(block, {}))

    def fill(self, block: int, contents: Contents) -> None:
        self._blocks[block] = dict(contents)

    def load(
        self, tables: Tables, digests: Sequence[int], start: int, end: int, state_end: int
    ) -> None:
        """Stores the positions from `start` to `end` in every group, as if loaded from external
        storage, and in groups of recurrent states the state after `state_end` tokens.
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
        """Fills blocks with contents that belong to no sequence, as after a failed load."""
        size = max(group.block_size for group in self._groups)
        for block in blocks:
            self._blocks[block] = dict.fromkeys(range(size), (-1, EMPTY))

    def is_void(self, tables: Tables, start: int, end: int) -> bool:
        """Whether queries from `start` to `end` see a position that belongs to no sequence."""
        return any(
            self._block(spec, table, position).get(position % spec.block_size, (0, None))[1]
            == EMPTY
            for spec, table in zip(self._groups, tables, strict=True)
            for position in range(_first_seen(spec, start), end)
        )

    def read_states(self, tables: Tables, digests: Sequence[int], start: int) -> None:
        """Checks the recurrent state from which a step continues, in every group of states. Must be
        called for all rows of a step before any state is written.
        """
        for group, (spec, table) in enumerate(zip(self._groups, tables, strict=True)):
            if spec.attention_type is AttentionType.STATE_SPACE and start and self._follows_states:
                held = self._block(spec, table, start - 1).get(_STATE)
                assert held == (group, digests[start - 1]), f"no state after {start} tokens"

    def write(self, tables: Tables, digests: Sequence[int], start: int, end: int) -> None:
        """Stores the values of the positions from `start` to `end`, in every group."""
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
        """Checks the positions that the queries from `start` to `end` see, in every group."""
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
    """The first position that a query sees. Infinite for recurrent states: they see none."""
    match spec.attention_type:
        case AttentionType.FULL:
            return 0
        case AttentionType.SLIDING_WINDOW:
            return max(0, query - spec.window + 1)
        case AttentionType.CHUNKED_LOCAL:
            return query - query % spec.window
        case AttentionType.STATE_SPACE:
            return 1 << 62
