"""Where pools publish what they cache: a directory in memory, which answers MatchPrefix, streams of
events, and the directory in Redis, which replicas share and gateways read.
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
    """How many blocks of a hash chain, from the first on, one pool need not compute."""

    pool_id: PoolId
    generation: int
    num_blocks: int


class EventSink(Protocol):
    """Gets every change to the prefix indexes, in order. It neither blocks nor raises."""

    def open(self, pool_id: PoolId, generation: int, config: PoolConfig) -> None:
        """A pool begins a new life, empty; what earlier ones published is forgotten."""

    def publish(self, pool_id: PoolId, batch: EventBatch) -> None:
        """A pool changed. A batch of a generation that is not the newest is ignored."""


class Directory(EventSink, Protocol):
    """Which prefixes are cached where. It may lag, and no answer depends on it."""

    async def match(self, hashes: Sequence[BlockHash]) -> list[PoolMatch]:
        """The depth of a chain in each pool where it is above 0, ordered by pool.

        That is the longest prefix of which every group has cached the part that it reads: all of
        it, its last window, or the state at its end.
        """

    def drop(self, pool_id: PoolId, generation: int) -> None:
        """A pool's life is over. Ignored if it is not the newest generation."""
