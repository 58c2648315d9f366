"""Reads the directory of cached prefixes from Redis into the gateway's index. A node is a replica's
KV pool. The directory has one log, whose entries list the block keys that nodes added and removed.
Each node also has a record (its epoch and KV-cache groups), a lease, which expires when the node
stops, and a snapshot of its keys.

Requests never wait for this reader. One task reads the log. Once a second, it also reads the
records and leases of the nodes. An epoch of a node is the time between two resets of its pool.

1. A node is removed if it has no lease, or if its lease and its record have different epochs.
2. A node is loaded from its snapshot if its epoch is new, if entries of the log are missing, or if
   its digest of its keys differs from the index's digest. The log is then read again from the
   snapshot's position. Entries that were already applied to other nodes are skipped.
3. After a failed call, the index is `degraded`: its matches may be wrong. If calls fail for longer
   than the duration of a lease, the index is `fallback`: it returns no matches, but keeps its keys.
   If Redis can be reached again and the nodes' epochs are unchanged, reading continues.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.pool.kv_directory import NodeLease, NodeRecord, NodeSnapshot
from services.common.redis import directory_layout
from services.common.redis.connection import RedisConnection, RedisUnavailable
from services.gateway.adapters.directory.metrics import ReaderCounts
from services.gateway.core.prefix_index.node_view import Applied, DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)

_BEGINNING = "0-0"
_ENTRIES_PER_READ = 256
_KEYS_PER_TURN = 2048
"""Number of keys that are applied before other tasks may run. Applying them takes about 2 ms."""
_SNAPSHOT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ReaderTimes:
    """Intervals and time limits of the reader, in seconds."""

    refresh_seconds: float = 1.0
    """Interval between two reads of records and leases."""
    urgent_seconds: float = 0.05
    """Interval between two reads of records and leases while a node needs to be loaded."""
    lease_seconds: float = 3.0
    """Seconds without contact after which leases may have expired."""
    watchdog_seconds: float = 0.5
    """A read of the log fails this number of seconds after the time that Redis waits for
    entries.
    """
    first_backoff_seconds: float = 0.05
    max_backoff_seconds: float = 0.5


class RedisReader:
    """Mirrors the directory of cached prefixes of one model in the index."""

    def __init__(
        self,
        index: PrefixIndex,
        redis: RedisConnection,
        tail: RedisConnection,
        times: ReaderTimes | None = None,
    ) -> None:
        """`tail` is a second connection, which only reads the log. Calls on `tail` may block while
        they wait for new entries.
        """
        self.counts = ReaderCounts()
        self._index = index
        self._redis = redis
        self._tail = tail
        self._times = times or ReaderTimes()
        self._keys = directory_layout.DirectoryKeys.of(b"")
        self._cursor: str | None = None
        self._refresh_at = 0.0
        self._contact_at = 0.0
        self._behind: dict[str, int] = {}
        """The nodes whose views in the index lacked log entries at the last check, with the numbers
        of the views' last entries at that time.
        """
        self._loaded: dict[str, tuple[int, int]] = {}
        """Maps nodes to the epoch and sequence number of the last loaded snapshot."""
        self._is_at_end = False
        """Whether the last read reached the end of the log."""
        self._is_known_lost = False
        self._applied_since_turn = 0

    async def run(self, fingerprint: Callable[[], bytes | None]) -> None:
        """Reads until cancelled. `fingerprint` returns the fingerprint of the gateway's current
        model, or None while it is not known. When the fingerprint changes, the index is cleared.
        """
        loop, times = asyncio.get_running_loop(), self._times
        backoff = times.first_backoff_seconds
        try:
            while True:
                if (found := fingerprint()) is None:
                    self._index.contact = DirectoryState.UNUSED
                    await asyncio.sleep(times.refresh_seconds)
                    continue
                if directory_layout.DirectoryKeys.of(found) != self._keys:
                    self._begin(directory_layout.DirectoryKeys.of(found))
                try:
                    await self._read_once()
                    backoff = times.first_backoff_seconds
                except RedisUnavailable as error:
                    self._failed(error, loop.time())
                    self._refresh_at = 0.0
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, times.max_backoff_seconds)
        finally:
            self._index.contact = DirectoryState.FALLBACK
            await asyncio.gather(self._redis.close(), self._tail.close())

    def _begin(self, keys: directory_layout.DirectoryKeys) -> None:
        for view in self._index.views:
            self._index.remove(view.node)
        self._keys, self._cursor, self._refresh_at = keys, None, 0.0
        self._behind.clear()
        self._loaded.clear()

    def _failed(self, error: RedisUnavailable, now: float) -> None:
        self.counts.failures += 1
        if not self._is_known_lost:
            logger.warning("the directory of cached prefixes in Redis cannot be read: %s", error)
        self._is_known_lost = True
        is_recent = self._contact_at and now < self._contact_at + self._times.lease_seconds
        self._index.contact = DirectoryState.DEGRADED if is_recent else DirectoryState.FALLBACK

    def _reached(self, now: float) -> None:
        if self._is_known_lost:
            logger.info("the directory of cached prefixes in Redis can be read again")
        self._is_known_lost = False
        self._contact_at = now
        self._index.contact = DirectoryState.EXACT

    async def _read_once(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._refresh_at or self._cursor is None:
            await self._refresh()
            self._reached(loop.time())
            is_exact = self._index.state is DirectoryState.EXACT
            times = self._times
            self._refresh_at = loop.time() + (
                times.refresh_seconds if is_exact else times.urgent_seconds
            )
        await self._read_log(max(0.001, self._refresh_at - loop.time()))

    # The log.

    async def _read_log(self, wait_seconds: float) -> None:
        """Applies the next entries of the log. If there is none, waits up to `wait_seconds`."""
        millis = max(1, int(1000 * wait_seconds))
        answer = await self._tail.call(
            lambda client: client.xread(
                {self._keys.log: self._cursor}, count=_ENTRIES_PER_READ, block=millis
            ),
            wait_seconds + self._times.watchdog_seconds,
        )
        self._is_at_end = sum(len(entries) for _, entries in answer or ()) < _ENTRIES_PER_READ
        for _, entries in answer or ():
            for entry_id, fields in entries:
                self._apply(fields)
                self._cursor = entry_id.decode()
                await self._let_others_run()

    def _apply(self, fields: dict[bytes, bytes] | None) -> None:
        try:
            batch = directory_layout.batch_from_bytes(
                (fields or {}).get(directory_layout.FIELD, b"")
            )
        except directory_layout.DamagedValue as error:
            self.counts.damaged += 1
            logger.warning(
                "a damaged entry of the log of cached prefixes in Redis is skipped: %s", error
            )
            return
        self._applied_since_turn += len(batch.added) + len(batch.removed) + 16
        match self._index.apply(batch):
            case Applied.DONE:
                self.counts.entries += 1
            case Applied.KNOWN | Applied.AWAITS_SNAPSHOT:
                pass
            case Applied.GAP:
                self.counts.gaps += 1
                self._refresh_soon()
            case Applied.DRIFTED:
                self.counts.drifts += 1
                self._refresh_soon()
            case Applied.OTHER_EPOCH:
                if batch.sequence == 0:
                    self._refresh_soon()

    def _refresh_soon(self) -> None:
        """Moves the next read of records and leases forward to `urgent_seconds` from now."""
        soon = asyncio.get_running_loop().time() + self._times.urgent_seconds
        self._refresh_at = min(self._refresh_at, soon)

    async def _let_others_run(self) -> None:
        if self._applied_since_turn >= _KEYS_PER_TURN:
            self._applied_since_turn = 0
            await asyncio.sleep(0)

    # Records, leases and snapshots.

    async def _refresh(self) -> None:
        keys = self._keys
        found = await self._redis.call(lambda client: client.hgetall(keys.nodes))
        records = self._records(found)
        commands: list[tuple[Any, ...]] = [("GET", keys.lease(r.node)) for r in records]
        commands.append(("XREVRANGE", keys.log, "+", "-", "COUNT", 1))
        *values, newest = await self._redis.pipeline(commands)
        self._follow_log(newest[0][0].decode() if newest else _BEGINNING)
        leases = self._leases(records, values)
        for view in self._index.views:
            if view.node not in leases:
                logger.info("pool %s is no longer in the directory of cached prefixes", view.node)
                self._index.remove(view.node)
                self._behind.pop(view.node, None)
                self._loaded.pop(view.node, None)
        for record, lease in leases.values():
            if self._must_load(record, lease):
                await self._load(record)

    def _follow_log(self, newest: str) -> None:
        """Sets the position in the log from which the next entries are read. If the log ends before
        the current position, it was emptied, and is read from its beginning.
        """
        if self._cursor is None:
            self._cursor = newest
        elif _position(newest) < _position(self._cursor):
            self._cursor = _BEGINNING

    def _records(self, found: dict[bytes, bytes]) -> list[NodeRecord]:
        records = []
        for node, value in found.items():
            try:
                records.append(directory_layout.record_from_bytes(node.decode(), value))
            except (directory_layout.DamagedValue, UnicodeDecodeError):
                self.counts.damaged += 1
        return records

    def _leases(
        self, records: Sequence[NodeRecord], values: Sequence[bytes | None]
    ) -> dict[str, tuple[NodeRecord, NodeLease]]:
        leases = {}
        for record, value in zip(records, values, strict=True):
            if value is None:
                continue
            try:
                lease = directory_layout.lease_from_bytes(value)
            except directory_layout.DamagedValue:
                self.counts.damaged += 1
                continue
            if lease.epoch == record.epoch:
                leases[record.node] = record, lease
        return leases

    def _must_load(self, record: NodeRecord, lease: NodeLease) -> bool:
        """Returns whether the index's view of a node is missing, wrong or from another epoch."""
        view = self._index.view(record.node)
        if view is None or view.epoch != record.epoch:
            # Keys of another epoch are invalid, even if the new epoch cannot be loaded.
            self._index.remove(record.node)
            return True
        if not view.is_exact:
            return True
        if not self._index.compare(record.node, lease):
            self.counts.drifts += 1
            return True
        if lease.sequence <= view.sequence or not self._is_at_end:
            self._behind.pop(record.node, None)
            return False
        # No entry arrived since the last check, so entries are missing and not only late.
        if self._behind.get(record.node) == view.sequence:
            self.counts.gaps += 1
            self._index.degrade(record.node)
            return True
        self._behind[record.node] = view.sequence
        return False

    async def _load(self, record: NodeRecord) -> None:
        """Loads a node's snapshot. If there is no usable snapshot, the node is degraded, and the
        snapshot is deleted so that its pool writes a new one.
        """
        key = self._keys.snapshot(record.node, record.epoch)
        value = await self._redis.call(lambda client: client.get(key), _SNAPSHOT_SECONDS)
        found = None if value is None else self._decode(value)
        loaded_before = self._loaded.get(record.node)
        if found is None or (found[0].epoch, found[0].sequence) == loaded_before:
            # This snapshot was loaded before and did not repair the node. If it is missing, the
            # pool writes a new one.
            await self._redis.call(lambda client: client.delete(key))
            if self._index.view(record.node) is None:
                self._index.begin(record.node, record.epoch, record.groups)
            self._index.degrade(record.node)
            return
        snapshot, parts = found
        view = record.node, record.epoch, record.groups, snapshot.sequence
        with self._index.loading(*view) as add:
            for keys in parts:
                add(keys)
                self._applied_since_turn += len(keys) + 16
                await self._let_others_run()
        self.counts.loads += 1
        self._loaded[record.node] = snapshot.epoch, snapshot.sequence
        self._behind.pop(record.node, None)
        if self._cursor is None or _position(snapshot.log_id) < _position(self._cursor):
            self._cursor = snapshot.log_id

    def _decode(self, value: bytes) -> tuple[NodeSnapshot, Iterator[list[int]]] | None:
        """Returns a snapshot and its keys in parts, or None if the snapshot is damaged."""
        try:
            return directory_layout.snapshot_from_bytes(value)
        except directory_layout.DamagedValue:
            self.counts.damaged += 1
            return None


def _position(log_id: str) -> tuple[int, int]:
    millis, _, number = log_id.partition("-")
    return int(millis), int(number or 0)
