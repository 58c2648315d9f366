"""The pools of a process. Each opening of a pool begins a new generation, with its own number,
transaction numbers and events.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.common.pool.ids import MAX_GENERATION, PoolId
from services.kvpool.core.errors import (
    InvalidPool,
    OutOfSequence,
    PoolNotFound,
    StaleGeneration,
    TooManyPools,
)
from services.kvpool.core.events import Event, EventBatch
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.ports import EventSink

Answer = TypeVar("Answer")


class TransactionLedger(Generic[Answer]):
    """Checks the transaction numbers of one generation, which are 1, 2, 3 and so on. A client whose
    stream broke does not know whether its last transaction was applied. It sends that transaction
    again and receives the stored answer.
    """

    __slots__ = ("_answer", "_generation", "_sequence")

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._sequence = 0
        self._answer: Answer | None = None

    def find(self, generation: int, sequence: int) -> Answer | None:
        """Returns None if `sequence` is the next transaction's number, and the stored answer if it
        is the last transaction's. Raises OutOfSequence for any other number, and StaleGeneration if
        `generation` is not the pool's current generation.
        """
        if generation != self._generation:
            raise StaleGeneration(
                f"generation {generation} of the pool was replaced by {self._generation}",
                field="generation",
            )
        if sequence == self._sequence + 1:
            return None
        if sequence == self._sequence and self._answer is not None:
            return self._answer
        raise OutOfSequence(
            f"transaction {sequence} arrived after transaction {self._sequence}", field="sequence"
        )

    def record(self, sequence: int, answer: Answer) -> None:
        self._sequence = sequence
        self._answer = answer


@dataclass(slots=True)
class HostedPool(Generic[Answer]):
    """A generation of a pool, the answer to its last transaction, and its number of batches."""

    pool_id: PoolId
    generation: int
    pool: KVPool
    ledger: TransactionLedger[Answer]
    reports_events: bool = False
    """Whether each answer includes the transaction's changes of the prefix index."""
    num_batches: int = 0

    def snapshot(self) -> EventBatch:
        """Returns every hash in the prefix index, with the sequence number of the last batch."""
        return EventBatch(self.generation, self.num_batches, True, self.pool.snapshot())


@dataclass(eq=False)
class PoolHost(Generic[Answer]):
    """Opens pools and publishes their events. Each block takes about a hundred bytes of memory.

    `clock_micros` returns wall-clock time in microseconds. The number of a new generation is at
    least this time, so that numbers increase across restarts of the process although nothing is
    stored on disk. The number is also greater than the newest generation that the scheduler has
    seen, so that numbers increase even if the clock was set back.
    """

    sinks: Sequence[EventSink]
    clock_micros: Callable[[], int]
    max_pools: int
    max_blocks_per_pool: int
    _pools: dict[PoolId, HostedPool[Answer]] = field(init=False, default_factory=dict)
    _last_generation: int = field(init=False, default=0)

    def open(
        self,
        pool_id: PoolId,
        config: PoolConfig,
        seen_generation: int = 0,
        *,
        reports_events: bool = False,
    ) -> HostedPool[Answer]:
        """Opens a generation of a pool, with a number greater than `seen_generation`. The new
        generation replaces an older one. If InvalidPool, UnsupportedGroup or TooManyPools is
        raised, an older generation stays open.
        """
        if not pool_id:
            raise InvalidPool("pool_id must not be empty", field="pool_id")
        if config.num_blocks > self.max_blocks_per_pool:
            raise InvalidPool(
                f"num_blocks is {config.num_blocks}, but this kvpool allows "
                f"{self.max_blocks_per_pool} in a pool (max_blocks_per_pool)",
                field="num_blocks",
            )
        if pool_id not in self._pools and len(self._pools) >= self.max_pools:
            raise TooManyPools(
                f"{len(self._pools)} pools are open, the most that this kvpool allows"
            )
        if seen_generation >= MAX_GENERATION:
            raise InvalidPool(
                f"seen_generation must be below {MAX_GENERATION}, not {seen_generation}",
                field="seen_generation",
            )
        pool = KVPool(config)
        seen = max(self._last_generation, seen_generation)
        self._last_generation = max(seen + 1, self.clock_micros())
        generation = self._last_generation
        ledger = TransactionLedger[Answer](generation)
        hosted = HostedPool(pool_id, generation, pool, ledger, reports_events)
        self._pools[pool_id] = hosted
        for sink in self.sinks:
            sink.open(pool_id, hosted.generation, config)
        return hosted

    def get(self, pool_id: PoolId) -> HostedPool[Answer]:
        """Returns the current generation of a pool. Raises PoolNotFound."""
        hosted = self._pools.get(pool_id)
        if hosted is None:
            raise PoolNotFound(f"no pool {pool_id!r} is open", field="pool_id")
        return hosted

    def pools(self) -> list[HostedPool[Answer]]:
        return sorted(self._pools.values(), key=lambda hosted: hosted.pool_id)

    def publish_events(self, hosted: HostedPool[Answer]) -> tuple[Event, ...]:
        """Publishes and returns the changes of a pool's prefix index since the last call."""
        events = hosted.pool.take_events()
        if not events:
            return ()
        hosted.num_batches += 1
        batch = EventBatch(hosted.generation, hosted.num_batches, False, events)
        for sink in self.sinks:
            sink.publish(hosted.pool_id, batch)
        return events
