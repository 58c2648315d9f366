"""The cache of the paged model: blocks that groups of layers write, and what they read of them.

A block holds what was last written to it, by whichever group it belonged to then. What a group
reads is what its kind of attention sees: everything, a window, a chunk, or the state that the step
before left. Each value names the group, so that a block that is in two hands shows at once.
"""

from collections.abc import Iterable, Sequence

from services.common.kv_cache_groups import AttentionType, KVCacheGroup

Tables = Sequence[Sequence[int]]
"""The block table of a request in each group."""

_STATE = "state"


class PagedCache:
    """Keys and values, one digest a position, and states, one digest a block."""

    def __init__(self, block_size: int, groups: Sequence[KVCacheGroup] = ()) -> None:
        self._block_size = block_size
        self._groups = groups or [KVCacheGroup(AttentionType.FULL, block_size)]
        self._blocks: dict[int, dict[int | str, tuple[int, int]]] = {}

    def zero(self, block_ids: Iterable[int]) -> None:
        """Forgets what blocks hold."""
        for block in block_ids:
            self._blocks.pop(block, None)

    def write(self, tables: Tables, digests: Sequence[int], start: int, end: int) -> None:
        """Stores what the positions from `start` to `end` hold, in every group; states are read
        before they are written.
        """
        for group, (spec, table) in enumerate(zip(self._groups, tables, strict=True)):
            assert end <= len(table) * self._block_size, "tokens without a slot in the cache"
            if spec.attention_type is AttentionType.STATE_SPACE:
                if start:
                    held = self._block(table, start - 1).get(_STATE)
                    assert held == (group, digests[start - 1]), f"no state after {start} tokens"
                block = self._block(table, end - 1)
                block.clear()
                block[_STATE] = group, digests[end - 1]
                continue
            for position in range(start, end):
                block = self._block(table, position)
                assert _STATE not in block, "a block that held a state was not zeroed"
                block[position % self._block_size] = group, digests[position]

    def read(self, tables: Tables, digests: Sequence[int], start: int, end: int) -> None:
        """Checks what the queries from `start` to `end` see, in every group."""
        for group, (spec, table) in enumerate(zip(self._groups, tables, strict=True)):
            for position in range(_first_seen(spec, start), end):
                held = self._block(table, position).get(position % self._block_size)
                assert held == (group, digests[position]), (
                    f"position {position} of group {group} holds another sequence"
                )

    def _block(self, table: Sequence[int], position: int) -> dict[int | str, tuple[int, int]]:
        block = table[position // self._block_size]
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
