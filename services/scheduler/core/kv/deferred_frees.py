"""Blocks that stay taken until the output of a step in flight has come."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile

from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.operations import (
    BlockCopy,
    BlockTables,
    Operation,
    Release,
    ReleaseCopies,
)
from services.scheduler.core.kv.kv_cache_manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class _DeferredFree:
    operation: Operation
    blocks: Sequence[BlockId]
    fence: int
    """The step with whose output they become free."""


class DeferredFrees:
    """Blocks that a step in flight writes, or copies, and that nothing else holds.

    They are given back in the order in which they were added, as in vLLM: none before those that
    were added before it.
    """

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._waiting: deque[_DeferredFree] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def blocks(self) -> list[list[BlockId]]:
        """The blocks of each request that ended, group after group, and of the copies of each step,
        the last of them first.
        """
        return [list(free.blocks) for free in self._waiting]

    def add_request(self, key: RequestKey, tables: BlockTables, fence: int) -> None:
        """The blocks of a request that ended. They become free as one list."""
        held = (block for table in tables for block in dropwhile(lambda block: not block, table))
        self._waiting.append(_DeferredFree(Release((key,), as_one_list=True), [*held], fence))

    def add_copies(self, copies: Sequence[BlockCopy], fence: int) -> None:
        """The blocks of the copies that a step makes."""
        blocks = [block for copy in copies for block in (copy.source, copy.target)]
        self._waiting.append(_DeferredFree(ReleaseCopies(len(copies)), blocks[::-1], fence))

    def give_back(self, step: int) -> None:
        """Gives back, with the next transaction, what waited for the output of this step."""
        while self._waiting and self._waiting[0].fence <= step:
            self._kv_cache_manager.pending.give_back_in_order(self._waiting.popleft().operation)

    def forget(self) -> None:
        """Starts over: the pool is empty."""
        self._waiting.clear()
