"""Blocks that are freed only after the output of a step in flight has arrived."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile

from services.common.pool.ids import BlockId
from services.common.pool.operations import (
    BlockCopy,
    BlockTables,
    Operation,
    Release,
    ReleaseCopies,
)
from services.scheduler.core.kv.kv_cache_manager import KVCacheManager
from services.scheduler.core.request import Request


@dataclass(frozen=True, slots=True)
class _DeferredFree:
    operation: Operation
    blocks: Sequence[BlockId]
    fence: int
    """The blocks are freed when the output of this step has arrived."""


class DeferredFrees:
    """Blocks that steps in flight still write or copy, although their request has ended. As in
    vLLM, the blocks are freed strictly in the order in which they were added.
    """

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._waiting: deque[_DeferredFree] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def blocks(self) -> list[list[BlockId]]:
        """One list of blocks for each ended request (in the order of KV-cache groups), and one for
        the copies of each step (in reverse order).
        """
        return [list(free.blocks) for free in self._waiting]

    def add_request(self, request: Request, tables: BlockTables, fence: int) -> None:
        """Adds an ended request's blocks, to be freed when the output of step `fence` has arrived.
        If the request has a context (of an agent), they then stay cached as this context.
        """
        held = (block for table in tables for block in dropwhile(lambda block: not block, table))
        contexts = () if request.context is None else (request.context,)
        release = Release((request.key,), as_one_list=True, contexts=contexts)
        self._waiting.append(_DeferredFree(release, [*held], fence))

    def add_copies(self, copies: Sequence[BlockCopy], fence: int) -> None:
        """Adds the source and target blocks of the copies that step `fence` makes."""
        blocks = [block for copy in copies for block in (copy.source, copy.target)]
        self._waiting.append(_DeferredFree(ReleaseCopies(len(copies)), blocks[::-1], fence))

    def give_back(self, step: int) -> None:
        """Makes the next transaction free the blocks that waited for the output of this step."""
        while self._waiting and self._waiting[0].fence <= step:
            self._kv_cache_manager.pending.give_back_in_order(self._waiting.popleft().operation)

    def forget(self) -> None:
        self._waiting.clear()
