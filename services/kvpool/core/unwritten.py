"""Changes of a pool's prefix index that are not yet in the log of the directory in Redis."""

from collections.abc import Iterable

from services.common.pool.block_hash import BlockHash
from services.common.pool.kv_directory import Digest, block_keys
from services.kvpool.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, EventBatch


class UnwrittenChanges:
    """Stores the keys (shortened hashes) that are cached now, and the keys added or removed since
    the last `take`. A key that was both added and removed is not reported. After more than
    `max_keys` changes, or a reset of the pool, the changes are dropped and `must_restart` is set.
    The owner must then write a snapshot, which begins a new epoch in the log. Readers discard the
    entries of earlier epochs.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._cached: set[int] = set()
        self._xor = 0
        # Dictionaries serve as ordered sets, so that the keys of a chain are written in order.
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self.must_restart = False
        self.num_dropped = 0

    def apply(self, batch: EventBatch) -> None:
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
        return len(self._added) + len(self._removed)

    @property
    def digest(self) -> Digest:
        """The number of cached keys and a checksum of them."""
        return Digest(len(self._cached), self._xor)

    def take(self) -> tuple[list[int], list[int]]:
        """Returns the keys added and the keys removed since the last call. No key is in both."""
        changes = list(self._added), list(self._removed)
        self._forget_changes()
        return changes

    def keys(self) -> list[int]:
        return list(self._cached)

    def restart(self) -> list[int]:
        """Drops the changes, because a new epoch begins, and returns all keys."""
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
