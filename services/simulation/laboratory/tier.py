"""A simulated tier of host memory, to which a replica offloads KV blocks."""

from collections import deque
from dataclasses import dataclass

from services.common.pool.ids import RequestKey
from services.scheduler.core.kv_transfer import KVConnectorMetadata, KVTransferResults
from services.simulation.laboratory.clock import EventClock


@dataclass(frozen=True, slots=True)
class TierSize:
    num_blocks: int
    """The number of blocks in each replica's tier. 0 means that there is no tier."""
    seconds_per_block: float
    """The time to copy a block from the tier to the KV cache."""


NO_TIER = TierSize(0, 0.0)


class SimulatedTier:
    """The loads from the tier, which use the bus one after the other, in parallel with steps. The
    scheduler's index stores which blocks are in the tier. Copies to the tier take no time.
    """

    def __init__(self, clock: EventClock, seconds_per_block: float) -> None:
        self._clock = clock
        self._seconds_per_block = seconds_per_block
        self._free_at = 0.0
        """The time at which the bus has copied all requested blocks."""
        self._loads: deque[tuple[float, RequestKey]] = deque()
        """The end time and the request of each load in progress."""

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    @property
    def next_end(self) -> float:
        """The time at which the first load in progress ends. There must be one."""
        return self._loads[0][0]

    def begin(self, metadata: KVConnectorMetadata) -> None:
        self._free_at = max(self._free_at, self._clock.now)
        for load in metadata.loads:
            self._free_at += len(load.blocks) * self._seconds_per_block
            self._loads.append((self._free_at, load.request))

    def take_ended(self) -> KVTransferResults:
        """Returns the loads that have ended since the last call."""
        ended = []
        while self._loads and self._loads[0][0] <= self._clock.now:
            ended.append(self._loads.popleft()[1])
        return KVTransferResults(finished_recving=ended)
