"""What enters and leaves the prefix index, as its watchers are told.

The vocabulary is that of vLLM's KV events. Hashes are chained, so that a block's parents need no
mention: whoever holds the hashes of a prompt finds its depth with them alone.
"""

from dataclasses import dataclass

from services.common.block_hash import BlockHash


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
    """Nothing can be found any more."""


Event = BlocksStored | BlocksRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Consecutive changes of one life of a pool.

    `sequence` grows by one with each batch of a generation. A snapshot replaces everything that was
    said before; its `sequence` is that of the last batch it contains.
    """

    generation: int
    sequence: int
    snapshot: bool
    events: tuple[Event, ...]


class EventLog:
    """Events in order, until somebody takes them; neighbours of one kind become one."""

    __slots__ = ("_cleared", "_runs")

    def __init__(self) -> None:
        self._cleared = False
        self._runs: list[tuple[type[BlocksStored | BlocksRemoved], int, list[BlockHash]]] = []

    def stored(self, group: int, hashes: list[BlockHash]) -> None:
        """Notes hashes that entered the index of a group."""
        self._note(BlocksStored, group, hashes)

    def removed(self, group: int, hashes: list[BlockHash]) -> None:
        """Notes hashes that left the index of a group."""
        self._note(BlocksRemoved, group, hashes)

    def cleared(self) -> None:
        """Notes that nothing can be found any more; what was noted before no longer matters."""
        self._cleared = True
        self._runs.clear()

    def take(self) -> tuple[Event, ...]:
        """Hands out everything noted since the last call."""
        if not self._runs and not self._cleared:
            return ()
        runs = [kind(group, tuple(hashes)) for kind, group, hashes in self._runs]
        events: tuple[Event, ...] = (AllBlocksCleared(), *runs) if self._cleared else tuple(runs)
        self._cleared = False
        self._runs.clear()
        return events

    def _note(
        self, kind: type[BlocksStored | BlocksRemoved], group: int, hashes: list[BlockHash]
    ) -> None:
        if not hashes:
            return
        if self._runs and self._runs[-1][:2] == (kind, group):
            self._runs[-1][2].extend(hashes)
        else:
            self._runs.append((kind, group, hashes))
