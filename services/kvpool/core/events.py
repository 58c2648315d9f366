"""Events of hashes that enter or leave the prefix index. MatchPrefix, WatchEvents and the directory
in Redis are computed from these events. Gateways use WatchEvents or the directory to choose
replicas. They have the names of vLLM's KV events. An event does not name a block's parent. Hashes
are chained, so that the hashes of a prompt suffice to find its cached prefix.
"""

from dataclasses import dataclass

from services.common.pool.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Hashes that entered the prefix index, in chain order."""

    group: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Hashes that left the prefix index because no cached block has them any more."""

    group: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """All hashes left the prefix index."""


Event = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Consecutive changes of a pool. `sequence` grows by one with each batch of a generation, which
    begins when the pool is opened. A snapshot has all cached hashes, and replaces all batches up to
    its own `sequence`.
    """

    generation: int
    sequence: int
    snapshot: bool
    events: tuple[Event, ...]


class EventLog:
    """Stores events in order until `take`. Merges successive events of the same kind and group."""

    __slots__ = ("_cleared", "_runs")

    def __init__(self) -> None:
        self._cleared = False
        self._runs: list[tuple[type[BlocksStored | BlocksRemoved], int, list[BlockHash]]] = []

    def add(
        self, kind: type[BlocksStored | BlocksRemoved], group: int, hashes: list[BlockHash]
    ) -> None:
        """Adds hashes that entered or left the index of a group."""
        if not hashes:
            return
        if self._runs and self._runs[-1][:2] == (kind, group):
            self._runs[-1][2].extend(hashes)
        else:
            self._runs.append((kind, group, hashes))

    def cleared(self) -> None:
        self._cleared = True
        self._runs.clear()

    def take(self) -> tuple[Event, ...]:
        if not self._runs and not self._cleared:
            return ()
        runs = [kind(group, tuple(hashes)) for kind, group, hashes in self._runs]
        events: tuple[Event, ...] = (AllBlocksCleared(), *runs) if self._cleared else tuple(runs)
        self._cleared = False
        self._runs.clear()
        return events
