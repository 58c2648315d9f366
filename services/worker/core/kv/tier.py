from collections.abc import Sequence
from typing import Protocol

from services.worker.core.step import EndedTierLoad, TierBlocks, TierLoad


class Tier(Protocol):
    """Copies blocks between the cache and a tier. The thread that runs steps calls it."""

    def store(self, blocks: TierBlocks) -> None:
        """Copies blocks of the cache to the tier."""

    def begin_loads(self, loads: Sequence[TierLoad]) -> None:
        """Queues copies of tier blocks to the cache. Loads run one after the other."""

    def take_ended(self, *, is_idle: bool) -> tuple[EndedTierLoad, ...]:
        """Returns the loads that ended since the last call. `is_idle`: the step computes nothing,
        so that the call may wait for a moment for a running load.
        """

    def reset(self) -> None:
        """Waits until no load is running, and drops the results of ended loads."""
