"""Eviction with a known future: an offline optimum to which policies are compared.

Only the order in which the pool reuses cached blocks differs from other runs. The pool knows when
each program (a client's requests, one after the other) will send its next request, and first reuses
the blocks that will be needed last (L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", 1966). Blocks of ended programs are reused before all others, the end of
a program's prompt before its beginning, and the prefixes that programs share last.

The results are a bound for policies of eviction, but not for policies of admission. The bound is
not proven, because requests also wait in the queue before they use their blocks, and because the
time of a subagent is only estimated by its time on an idle replica.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from services.common.pool.ids import BlockId, RequestKey
from services.common.pool.operations import Operation, Outcome, Release
from services.kvpool.core.free_queue import FreeQueue
from services.kvpool.core.kv_pool import KVPool
from services.scheduler.core.config import SchedulerConfig
from services.simulation.inprocess_pool import InProcessPool, pool_config_of


class Owner(Protocol):
    """A program that will use a block again. For shared prefixes, all applications together."""

    @property
    def next_use(self) -> float: ...


class KnownFutureQueue(FreeQueue):
    """A free queue that first reuses the cached blocks whose owner's next use is the latest."""

    __slots__ = ("_by_owner", "owners")

    def __init__(self, blocks: Sequence[BlockId]) -> None:
        super().__init__(blocks)
        self.owners: dict[BlockId, Owner] = {}
        """Maps each block that a request has released to the owner that will use it again."""
        self._by_owner: dict[Owner, OrderedDict[BlockId, None]] = {}

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    def pop_cached(self, num_blocks: int) -> tuple[list[BlockId], list[int]]:
        blocks: list[BlockId] = []
        while len(blocks) < num_blocks:
            owner = max(self._by_owner, key=lambda one: one.next_use)
            owned = self._by_owner[owner]
            while owned and len(blocks) < num_blocks:
                blocks.append(owned.popitem(last=False)[0])
            if not owned:
                del self._by_owner[owner]
        return blocks, list(map(self._cached.pop, blocks))

    def push_cached(self, blocks: Iterable[BlockId], now: int) -> None:
        blocks = list(blocks)
        super().push_cached(blocks, now)
        for block in blocks:
            self._by_owner.setdefault(self.owners[block], OrderedDict())[block] = None

    def remove_cached(self, blocks: Sequence[BlockId]) -> tuple[Sequence[BlockId], list[int]]:
        for block in blocks:
            if block in self._cached:
                owner = self.owners[block]
                owned = self._by_owner[owner]
                del owned[block]
                if not owned:
                    del self._by_owner[owner]
        return super().remove_cached(blocks)


class KnownFuturePool(InProcessPool):
    """A pool for full attention with a KnownFutureQueue."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        queues: list[KnownFutureQueue] = []

        def make_free_queue(blocks: Sequence[BlockId]) -> KnownFutureQueue:
            queues.append(KnownFutureQueue(blocks))
            return queues[0]

        self.core = KVPool(pool_config_of(config), make_free_queue)
        (self._queue,) = queues
        self._requests: dict[RequestKey, tuple[Owner, Owner, int]] = {}

    def add(self, request: RequestKey, shared: Owner, own: Owner, num_shared_blocks: int) -> None:
        """Called when a request arrives. `shared` owns the request's first `num_shared_blocks`
        blocks, and `own` owns all others.
        """
        self._requests[request] = shared, own, num_shared_blocks

    @property
    def num_skippable_blocks(self) -> int:
        """The number of free blocks without a hash. Steps that reuse cached blocks are not skipped,
        because the order of reuse depends on the requests at other replicas too.
        """
        return self._queue.num_blank

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        for operation in operations:
            if isinstance(operation, Release):
                for key in operation.requests:
                    shared, own, num_shared_blocks = self._requests[key]
                    for index, block in enumerate(self.core.block_tables(key)[0]):
                        self._queue.owners[block] = shared if index < num_shared_blocks else own
        return await super().transact(operations, traceparent)
