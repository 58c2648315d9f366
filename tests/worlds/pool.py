"""The KV pool of a world (a simulated replica), with what the pool service adds to it: generations
(numbers of its successive openings), numbered transactions, KV events, and the log for the
directory. The pool can be lost in the middle of a step, and events of the world can occur there.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest

from services.common.errors import StepwellError
from services.common.pool.ids import PoolId, RequestKey
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import block_keys
from services.common.pool.operations import (
    Admission,
    Admit,
    Commit,
    EvictBlocks,
    Grow,
    Lookup,
    Operation,
    Outcome,
)
from services.kvpool.core.block_map import block_map
from services.kvpool.core.events import EventBatch
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.pool_host import PoolHost
from services.kvpool.core.unwritten import UnwrittenChanges
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.ports import PoolLost
from services.simulation.inprocess_pool import pool_config_of

_ID = PoolId("world")
MAX_UNWRITTEN = 40


class _Log:
    """An `EventSink` that keeps the log of block keys from which a directory reads."""

    def __init__(self) -> None:
        self.changes = UnwrittenChanges(MAX_UNWRITTEN)
        self.written: set[int] = set()

    def open(self, pool_id: PoolId, generation: int, config: PoolConfig) -> None:  # noqa: ARG002
        self.changes = UnwrittenChanges(MAX_UNWRITTEN)
        self.written.clear()

    def publish(self, pool_id: PoolId, batch: EventBatch) -> None:  # noqa: ARG002
        self.changes.apply(batch)

    def flush(self) -> None:
        """Appends all changes since the last call to the log."""
        if self.changes.must_restart:
            self.written = set(self.changes.restart())
        else:
            added, removed = self.changes.take()
            assert self.written.isdisjoint(added)
            assert self.written.issuperset(removed)
            self.written = (self.written | set(added)) - set(removed)
        assert self.changes.digest.count == len(self.written)


class WorldPool:
    """The scheduler's `KVPool`. `happened` counts rare events."""

    def __init__(self, config: SchedulerConfig, happened: Counter[str]) -> None:
        self._config = pool_config_of(config)
        self._happened = happened
        self._log = _Log()
        self._host: PoolHost[Outcome] = PoolHost(
            [self._log], lambda: 1, max_pools=1, max_blocks_per_pool=10_000
        )
        self._num_left: int | None = None
        self.mid_plan: deque[Callable[[], None]] = deque()
        """Events of the world that occur at the next transaction."""
        self.open()

    @property
    def core(self) -> KVPool:
        """The pool of the current generation."""
        return self._hosted.pool

    @property
    def is_lost(self) -> bool:
        """Whether the pool no longer answers."""
        return self._num_left == 0

    def open(self) -> None:
        """Begins a generation with an empty pool."""
        self._num_left, self._sequence = None, 0
        self._hosted = self._host.open(_ID, self._config)

    def lose_after(self, num_transactions: int) -> None:
        """Loses the pool after `num_transactions` more transactions."""
        self._num_left = num_transactions

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:  # noqa: ARG002
        await asyncio.sleep(0)
        while self.mid_plan:
            self.mid_plan.popleft()()
        if self._num_left is not None:
            if self._num_left == 0:
                raise PoolLost("the pool is away")
            self._num_left -= 1
        self._sequence += 1
        hosted, ledger = self._hosted, self._hosted.ledger
        assert ledger.find(hosted.generation, self._sequence) is None
        outcome = hosted.pool.transact(operations)
        ledger.record(self._sequence, outcome)
        assert ledger.find(hosted.generation, self._sequence) is outcome
        self._host.publish_events(hosted)
        hosted.pool.check()
        return outcome

    def check(self) -> None:
        """Checks that directory and prefix index agree, and that the pool's block map is right."""
        self._log.flush()
        found = self.core.snapshot()
        expected = {key for stored in found for key in block_keys(stored.hashes, stored.group)}
        assert self._log.written == expected
        assert self._hosted.snapshot().events == found
        shown = block_map(self.core.block_use(), 1 + self._sequence % 50)
        stats = self.core.stats()
        num_free = shown.num_blank + shown.num_cached + shown.num_retained
        assert num_free + shown.num_held + shown.num_shared == stats.num_usable_blocks
        assert shown.num_held + shown.num_shared == stats.num_usable_blocks - stats.num_free_blocks
        assert stats.num_hit_tokens <= stats.num_query_tokens

    def refuse(self, number: int) -> None:
        """Sends a wrong transaction, and checks that it is refused without any change."""
        held = next(iter(self.core._tables), None)
        wrong = _wrong(number, held, self._config.num_blocks)
        before = self.core.free_block_ids(), self.core.num_cached_hashes
        with pytest.raises(StepwellError):
            self.core.transact(wrong)
        assert (self.core.free_block_ids(), self.core.num_cached_hashes) == before
        with pytest.raises(StepwellError):
            self._hosted.ledger.find(self._hosted.generation + number % 2, self._sequence + 7)
        with pytest.raises(StepwellError):
            self._host.open(*_wrong_pool(number, self._config))
        with pytest.raises(StepwellError):
            self._host.get(PoolId("another"))
        assert [hosted.pool_id for hosted in self._host.pools()] == [_ID]


def _wrong(number: int, held: RequestKey | None, num_blocks: int) -> list[Operation]:
    """A transaction that the pool must refuse."""
    absent = RequestKey(10**9)
    wrong: list[Operation] = [
        Grow([absent], [0], [1]),
        Grow([absent], [0, 0], [1]),
        Commit([absent], [1], [[]]),
        Lookup([absent], [1, 2], [[]]),
        EvictBlocks((num_blocks,)),
        Admit([Admission(absent, 1, 2, 2, 2, 2)]),
        Admit([Admission(absent, 4, 4, 2, 2, 2)]),
        Admit([Admission(absent, 1, 1, 1, 1, 1, holds_blocks=True)]),
    ]
    if held is not None:
        wrong += [
            Lookup([held], [1], [[]]),
            Admit([Admission(held, 4, 0, 4, 0, 0, num_external_tokens=4, holds_blocks=True)]),
        ]
    return [wrong[number % len(wrong)]]


def _wrong_pool(number: int, config: PoolConfig) -> tuple[PoolId, PoolConfig, int]:
    """Arguments of an OpenPool call that must be refused."""
    full, sliding = AttentionType.FULL, AttentionType.SLIDING_WINDOW
    wrong_groups = [
        (),
        (KVCacheGroup(full, 0),),
        (KVCacheGroup(full, 4, 4),),
        (KVCacheGroup(sliding, 4, 1),),
        (KVCacheGroup(AttentionType.CHUNKED_LOCAL, 4, 6),),
        (KVCacheGroup(AttentionType.STATE_SPACE, 4, 4),),
        (KVCacheGroup(AttentionType.STATE_SPACE, 4),),
        (KVCacheGroup(full, 4, num_speculative_blocks=1),),
        (KVCacheGroup(AttentionType.CHUNKED_LOCAL, 4, 4), KVCacheGroup(full, 8)),
    ]
    wrong = [
        (PoolId(""), config, 0),
        (PoolId("another"), config, 0),
        (_ID, config, 2**62),
        (_ID, PoolConfig(10_001, config.groups), 0),
        (_ID, PoolConfig(1, config.groups), 0),
        (_ID, PoolConfig(10, (KVCacheGroup(full, 4),), prefix_match_unit=3), 0),
        (_ID, PoolConfig(10, (KVCacheGroup(full, 4),), prefix_match_unit=2), 0),
        (_ID, PoolConfig(10, (KVCacheGroup(full, 4),), prefix_cache_retention_interval=3), 0),
        (_ID, PoolConfig(10, (KVCacheGroup(full, 4),), prefix_cache_retention_interval=4), 0),
        *((_ID, PoolConfig(10, groups), 0) for groups in wrong_groups),
    ]
    return wrong[number % len(wrong)]
