"""Attention that looks back no further than a window."""

from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.group_manager import GroupManager


class SlidingWindowManager(GroupManager):
    """A query sees its own token and the `window - 1` before it.

    A request holds the window's blocks and those being computed; a hit needs only the last
    `window - 1` tokens' worth of blocks, which is all that the next query sees of the past.
    """

    __slots__ = ("_window",)

    def __init__(
        self,
        group: int,
        block_size: int,
        window: int,
        pool: BlockPool,
        *,
        drop_last_hit_block: bool,
    ) -> None:
        super().__init__(group, block_size, pool, drop_last_hit_block=drop_last_hit_block)
        self._window = window

    def first_seen_block(self, num_tokens: int) -> int:
        """Where the window of the next query begins."""
        return max(0, num_tokens - self._window + 1) // self._block_size

    def max_held_blocks(self, num_slots: int, num_step_tokens: int) -> int:
        """The window, a step, and one block since the window may begin within one."""
        held = -(-(self._window - 1 + num_step_tokens) // self._block_size) + 1
        return min(held, -(-num_slots // self._block_size))


class ChunkedLocalManager(GroupManager):
    """A query sees the tokens of its own chunk: positions are cut into chunks of `window` tokens.

    A request holds the blocks of its current chunk. Whatever came before a chunk's beginning is a
    hit without being looked up, since nobody will read it. Chunks are whole blocks.
    """

    __slots__ = ("_window",)

    def __init__(self, group: int, block_size: int, window: int, pool: BlockPool) -> None:
        super().__init__(group, block_size, pool)
        self._window = window

    def first_seen_block(self, num_tokens: int) -> int:
        """Where the chunk of the next query begins."""
        return num_tokens // self._window * self._window // self._block_size

    def max_held_blocks(self, num_slots: int, num_step_tokens: int) -> int:
        """A chunk and a step."""
        held = -(-(self._window + num_step_tokens) // self._block_size)
        return min(held, -(-num_slots // self._block_size))
