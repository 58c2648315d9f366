"""The ports to which pools publish their prefix indexes. They have three implementations: the
directory in memory for MatchPrefix, streams of events for WatchEvents, and the directory in Redis,
which replicas share and gateways read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import PoolId
from services.kvpool.core.events import EventBatch
from services.kvpool.core.pool_config import PoolConfig


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """The number of leading blocks of a hash chain that one pool has cached."""

    pool_id: PoolId
    generation: int
    num_blocks: int


class EventSink(Protocol):
    """Receives every change of the prefix indexes, in order. Never blocks, and raises no error."""

    def open(self, pool_id: PoolId, generation: int, config: PoolConfig) -> None:
        """Notes that a pool was opened, empty and with a new generation number. Forgets its earlier
        generations.
        """

    def publish(self, pool_id: PoolId, batch: EventBatch) -> None:
        """Applies a batch of a pool's events. Batches of older generations are ignored."""


class Directory(EventSink, Protocol):
    """Stores which prefixes each pool has cached. It may lag, since no output depends on it."""

    async def match(self, hashes: Sequence[BlockHash]) -> list[PoolMatch]:
        """Returns the hit length of a chain in each pool, ordered by pool. Pools without a hit are
        left out. The hit is the longest prefix that every group can use. Depending on its attention
        type, a group must have cached the whole prefix, the prefix's last window, or the state at
        its end.
        """

    def drop(self, pool_id: PoolId, generation: int) -> None:
        """Removes a pool's entries if `generation` is the pool's newest generation."""
