"""Changes of a pool's prefix index, in one life, that are not yet in the directory's log."""

from collections.abc import Iterable

from services.common.pool.block_hash import BlockHash
from services.common.pool.kv_directory import Digest, block_keys
from services.kvpool.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, EventBatch


class UnwrittenChanges:
    """The keys that are cached now, and which of them entered or left since they were last taken.

    A key that entered and left again in between is in neither. Beyond `max_keys` changes they are
    forgotten, and `must_restart` is set: the log must begin a new life with a snapshot. So it must
    after a reset.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._cached: set[int] = set()
        self._xor = 0
        # Dictionaries as ordered sets: chains are written from their beginning on.
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self.must_restart = False
        self.num_dropped = 0
        """Changes that were forgotten."""

    def apply(self, batch: EventBatch) -> None:
        """Takes note of a batch of events."""
        if batch.snapshot:
            self._clear()
        for event in batch.events:
            match event:
                case BlocksStored(group, hashes):
                    self._store(hashes, group)
                case BlocksRemoved(group, hashes):
                    self._remove(hashes, group)
                case AllBlocksCleared():
                    self._clear()
        if len(self) > self._max_keys:
            self.num_dropped += len(self)
            self._forget_changes()
            self.must_restart = True

    def __len__(self) -> int:
        """Changes since the last `take`."""
        return len(self._added) + len(self._removed)

    @property
    def digest(self) -> Digest:
        """The digest of all keys that are cached now."""
        return Digest(len(self._cached), self._xor)

    def take(self) -> tuple[list[int], list[int]]:
        """The keys that entered and those that left since the last call, which share none."""
        changes = list(self._added), list(self._removed)
        self._forget_changes()
        return changes

    def keys(self) -> list[int]:
        """All keys that are cached now."""
        return list(self._cached)

    def restart(self) -> list[int]:
        """Begins a new life: all keys, and no changes."""
        self._forget_changes()
        self.must_restart = False
        return self.keys()

    def _store(self, hashes: Iterable[BlockHash], group: int) -> None:
        for key in block_keys(hashes, group):
            if key not in self._cached:
                self._cached.add(key)
                self._xor ^= key
                if key in self._removed:
                    del self._removed[key]
                else:
                    self._added[key] = None

    def _remove(self, hashes: Iterable[BlockHash], group: int) -> None:
        for key in block_keys(hashes, group):
            if key in self._cached:
                self._cached.remove(key)
                self._xor ^= key
                if key in self._added:
                    del self._added[key]
                else:
                    self._removed[key] = None

    def _clear(self) -> None:
        self._cached.clear()
        self._xor = 0
        self._forget_changes()
        self.must_restart = True

    def _forget_changes(self) -> None:
        self._added.clear()
        self._removed.clear()
