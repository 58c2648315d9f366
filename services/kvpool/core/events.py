"""What enters and leaves the prefix index: MatchPrefix, WatchEvents and the directory in Redis, by
which gateways choose replicas, are fed with it.

The vocabulary is that of vLLM's KV events. Hashes are chained, so a block's parent is not named:
the hashes of a prompt are enough to find how deep it is cached.
"""

from dataclasses import dataclass

from services.common.pool.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Hashes that can be found now, in chain order."""

    group: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Hashes that left the index: their last block was reused."""

    group: int
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every hash was forgotten."""


Event = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Consecutive changes of one life of a pool.

    `sequence` grows by one with each batch of a generation. A snapshot replaces all batches
    before it; its `sequence` is that of the last batch it contains.
    """

    generation: int
    sequence: int
    snapshot: bool
    events: tuple[Event, ...]


class EventLog:
    """Events in order, until they are taken; consecutive ones of a kind and group become one."""

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
        """Adds that every hash was forgotten, and drops the events before it."""
        self._cleared = True
        self._runs.clear()

    def take(self) -> tuple[Event, ...]:
        """The events since the last call."""
        if not self._runs and not self._cleared:
            return ()
        runs = [kind(group, tuple(hashes)) for kind, group, hashes in self._runs]
        events: tuple[Event, ...] = (AllBlocksCleared(), *runs) if self._cleared else tuple(runs)
        self._cleared = False
        self._runs.clear()
        return events
