"""Writes a pool's cached keys (shortened block hashes) to the directory in Redis.

A node is the pool of one scheduler. A task appends the node's changes to the directory's log. When
a call to Redis fails, the task does not know which of its entries are in the log. Therefore it
retries, with growing delays, to write a snapshot, which begins a new epoch of the node. Readers
then discard the entries of earlier epochs. `services.common.redis.directory_layout` defines the
keys in Redis and the formats of their values.
"""

import asyncio
import logging
import random
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.common.pool.kv_directory import Digest, KeyBatch, NodeLease, NodeRecord, NodeSnapshot
from services.common.redis.connection import RedisConnection, RedisUnavailable
from services.common.redis.directory_layout import (
    FIELD,
    DamagedValue,
    DirectoryKeys,
    batch_to_bytes,
    lease_to_bytes,
    record_from_bytes,
    record_to_bytes,
    snapshot_to_bytes,
)
from services.kvpool.core.events import EventBatch
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.unwritten import UnwrittenChanges

logger = logging.getLogger(__name__)

MAX_KEYS_PER_ENTRY = 8192
_SNAPSHOT_CALL_SECONDS = 5.0
_LEAVE_SECONDS = 0.3
_COUNTER_BITS = 10

Command = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class WriterTimes:
    """The intervals in seconds of a node's writes, and limits on the number of changes."""

    flush_seconds: float = 0.005
    """How long changes are collected before they are written as one entry."""
    heartbeat_seconds: float = 1.0
    """How often the node's lease is renewed. The lease shows readers that the node runs."""
    lease_seconds: float = 3.0
    """The time after which an unrenewed lease expires."""
    snapshot_seconds: float = 30.0
    snapshot_changes: int = 50_000
    """A snapshot is written after this many changes, and at the latest after `snapshot_seconds`."""
    first_backoff_seconds: float = 0.05
    max_backoff_seconds: float = 0.5
    max_unwritten_keys: int = 262_144
    """If there are more unwritten changes, the node begins a new epoch with a snapshot."""


@dataclass(slots=True)
class WriterCounts:
    """Counts the writes and failures for all pools since the process started."""

    entries: int = 0
    keys: int = 0
    """The number of keys that all log entries together have added or removed."""
    snapshots: int = 0
    num_epochs: int = 0
    failures: int = 0
    """Failures of calls to Redis, including timeouts."""
    nodes_connected: set[str] = field(default_factory=set)
    """Nodes whose current epoch is in the directory."""


class _Superseded(Exception):
    """Another process has begun to write the changes of this node."""


class _EpochLost(Exception):
    """A new epoch must begin, because Redis lost keys of this epoch, or changes were dropped."""


class NodeWriter:
    """Writes a pool, from one opening to the next (a generation), as one or more epochs."""

    def __init__(
        self,
        generation: int,
        config: PoolConfig,
        redis: RedisConnection,
        times: WriterTimes,
        counts: WriterCounts,
    ) -> None:
        self.generation = generation
        self.node = config.node
        self.changes = UnwrittenChanges(times.max_unwritten_keys)
        self._config = config
        self._keys = DirectoryKeys.of(config.fingerprint)
        self._redis = redis
        self._times = times
        self._counts = counts
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._epoch = 0
        self._sequence = 0
        self._digest = Digest()
        """A checksum of the cached keys as of the last log entry, whose number is `sequence`."""
        self._log_id = "0-0"
        self._num_changes_since_snapshot = 0
        self._snapshot_at = 0.0
        self._heartbeat_at = 0.0
        self._is_failing = False
        """Whether a call to Redis has failed since the last epoch began."""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_log_defect)

    def note(self, batch: EventBatch) -> None:
        """Records a batch, which the task writes soon."""
        self.changes.apply(batch)
        self._news.set()

    async def stop(self) -> None:
        """Ends the task. The node stays in the directory for the pool's next generation."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._counts.nodes_connected.discard(self.node)

    async def leave(self, *, has_successor: bool = False) -> None:
        """Ends the task and removes the node from the directory, if Redis answers in time. If no
        other node is left, also deletes the log, because no node would trim it any more. Does not
        delete the log if `has_successor`, because another node is about to begin.
        """
        await self.stop()
        if not self._epoch:
            return
        keys = self._keys
        with suppress(RedisUnavailable, TimeoutError):  # the lease's expiry also removes the node
            async with asyncio.timeout(_LEAVE_SECONDS):
                if await self._is_superseded():
                    return
                *_, has_nodes = await self._redis.pipeline(
                    [
                        ("HDEL", keys.nodes, self.node, *await self._lost_nodes()),
                        ("DEL", keys.lease(self.node), self._snapshot_key),
                        ("EXISTS", keys.nodes),
                    ]
                )
                if not has_nodes and not has_successor:
                    await self._redis.pipeline([("DEL", keys.log, keys.epoch)])

    async def _run(self) -> None:
        backoff = self._times.first_backoff_seconds
        while True:
            try:
                await self._begin()
                backoff = self._times.first_backoff_seconds
                await self._follow()
            except _EpochLost:
                continue
            except _Superseded:
                logger.warning(
                    "pool %s is no longer written to the directory in Redis: another process "
                    "writes the pool",
                    self.node,
                )
                return
            except RedisUnavailable as error:
                if not self._is_failing:
                    logger.warning(
                        "the directory of cached prefixes in Redis cannot be written: %s", error
                    )
                self._is_failing = True
                self._counts.nodes_connected.discard(self.node)
                self._counts.failures += 1
            await asyncio.sleep(backoff * random.uniform(0.75, 1.25))
            backoff = min(2 * backoff, self._times.max_backoff_seconds)

    async def _begin(self) -> None:
        """Begins an epoch of the node: increments the epoch counter and writes a snapshot."""
        keys, before = self._keys, self._epoch
        number, newest = await self._redis.pipeline(
            [("INCR", keys.epoch), ("XREVRANGE", keys.log, "+", "-", "COUNT", 1)]
        )
        # Redis repeats values of the counter after a flush or a restart from an old dump, so an
        # epoch number also contains the time. The counter distinguishes epochs of one microsecond.
        micros = time.time_ns() // 1000
        self._epoch = micros << _COUNTER_BITS | number % (1 << _COUNTER_BITS)
        self._sequence = 0
        self._log_id = _text(newest[0][0]) if newest else "0-0"
        cached, self._digest = self.changes.restart(), self.changes.digest
        await self._write_snapshot(cached)
        begin = KeyBatch(self._epoch, 0, digest=self._digest)
        await self._write([*self._heartbeat(), self._entry(begin)])
        if before:
            await self._redis.pipeline([("DEL", keys.snapshot(self.node, before))])
        if lost := await self._lost_nodes():
            await self._redis.pipeline([("HDEL", keys.nodes, *lost)])
        self._counts.num_epochs += 1
        self._is_failing = False
        if self.node not in self._counts.nodes_connected:
            logger.info(
                "pool %s is in the directory of cached prefixes at %s", self.node, self._redis.name
            )
            self._counts.nodes_connected.add(self.node)

    async def _follow(self) -> None:
        """Writes changes, heartbeats and snapshots until it raises RedisUnavailable, _EpochLost or
        _Superseded.
        """
        loop = asyncio.get_running_loop()
        while True:
            if await self._changes_before(min(self._heartbeat_at, self._snapshot_at)):
                await asyncio.sleep(self._times.flush_seconds)
            is_heartbeat = loop.time() >= self._heartbeat_at
            if is_heartbeat and await self._is_superseded():
                raise _Superseded
            if self.changes.must_restart:
                raise _EpochLost
            # No other task runs between the next two lines, so `cached` has exactly the keys after
            # the last entry.
            entries = self._take_entries(with_digest=is_heartbeat)
            cached = self.changes.keys() if self._is_snapshot_due(loop.time()) else None
            commands = [self._entry(entry) for entry in entries]
            if is_heartbeat:
                commands += self._heartbeat()
            if commands and not await self._write(commands):
                logger.info(
                    "Redis lost the cached prefixes of pool %s, which are written again", self.node
                )
                raise _EpochLost
            if cached is not None:
                await self._write_snapshot(cached)

    async def _changes_before(self, when: float) -> bool:
        if not len(self.changes) and not self.changes.must_restart:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(when):
                    await self._news.wait()
        return len(self.changes) > 0

    def _is_snapshot_due(self, now: float) -> bool:
        """Whether a snapshot is due, by time or by the number of changes. A large pool's snapshot
        is slow, so it is due after more changes.
        """
        bound = max(self._times.snapshot_changes, self._digest.count // 2)
        return now >= self._snapshot_at or self._num_changes_since_snapshot >= bound

    def _take_entries(self, *, with_digest: bool) -> list[KeyBatch]:
        """Returns the changes as log entries, the last one with the digest if `with_digest`."""
        added, removed = self.changes.take()
        self._digest = self.changes.digest
        num_changes = len(added) + len(removed)
        if not num_changes:
            return []
        parts: list[tuple[Sequence[int], Sequence[int]]] = [(added, removed)]
        if num_changes > (size := MAX_KEYS_PER_ENTRY):
            parts = [((), removed[at : at + size]) for at in range(0, len(removed), size)]
            parts += [(added[at : at + size], ()) for at in range(0, len(added), size)]
        first = self._sequence + 1
        self._sequence += len(parts)
        entries = [
            KeyBatch(
                self._epoch,
                sequence,
                *part,
                self._digest if with_digest and sequence == self._sequence else None,
            )
            for sequence, part in enumerate(parts, first)
        ]
        self._num_changes_since_snapshot += num_changes
        self._counts.entries += len(entries)
        self._counts.keys += num_changes
        return entries

    def _entry(self, batch: KeyBatch) -> Command:
        """Returns the command that appends a batch to the log and drops entries older than twice
        `snapshot_seconds`. An entry's id contains the time at which Redis added the entry.
        """
        kept_millis = int(2_000 * self._times.snapshot_seconds)
        oldest = max(0, int(self._log_id.partition("-")[0]) - kept_millis)
        trim = ("MINID", "~", f"{oldest}-0")
        return ("XADD", self._keys.log, *trim, "*", FIELD, batch_to_bytes(batch))

    def _heartbeat(self) -> list[Command]:
        """Commands that renew the node's lease and record, and check that required keys exist."""
        keys, node = self._keys, self.node
        lease = NodeLease(self._epoch, self._sequence, self._digest)
        record = NodeRecord(node, self._epoch, self.generation, self._config.groups)
        self._heartbeat_at = asyncio.get_running_loop().time() + self._times.heartbeat_seconds
        return [
            ("SET", keys.lease(node), lease_to_bytes(lease), "PX", self._lease_millis),
            ("HSET", keys.nodes, node, record_to_bytes(record)),
            ("EXISTS", keys.epoch, keys.log, self._snapshot_key),
        ]

    async def _write(self, commands: list[Command]) -> bool:
        """Writes entries and a heartbeat. Returns whether all required keys exist in Redis."""
        holds = True
        answers = await self._redis.pipeline(commands)
        for (name, *arguments), answer in zip(commands, answers, strict=True):
            if name == "XADD":
                self._log_id = _text(answer)
            elif name == "EXISTS":
                holds = answer == len(arguments)
        return holds

    async def _write_snapshot(self, cached: list[int]) -> None:
        times = self._times
        snapshot = NodeSnapshot(self._epoch, self._sequence, self._log_id)
        self._snapshot_at = asyncio.get_running_loop().time() + times.snapshot_seconds
        self._num_changes_since_snapshot = 0
        value = await in_turns(snapshot_to_bytes(snapshot, cached))
        command = ("SET", self._snapshot_key, value, "PX", int(3_000 * times.snapshot_seconds))
        await self._redis.pipeline([command], _SNAPSHOT_CALL_SECONDS)
        self._counts.snapshots += 1

    async def _is_superseded(self) -> bool:
        """Whether another process has registered a later epoch of this node."""
        keys, node = self._keys, self.node
        value = await self._redis.call(lambda client: client.hget(keys.nodes, node))
        try:
            return value is not None and record_from_bytes(node, value).epoch > self._epoch
        except DamagedValue:
            return False

    async def _lost_nodes(self) -> list[bytes]:
        """Returns the nodes that have a record but no lease: their processes ended without removing
        the record. If a node's process only paused, its next heartbeat restores the record.
        """
        keys = self._keys
        nodes = list(await self._redis.call(lambda client: client.hgetall(keys.nodes)))
        leases = await self._redis.pipeline(
            [("EXISTS", keys.lease(node.decode(errors="replace"))) for node in nodes]
        )
        return [node for node, lease in zip(nodes, leases, strict=True) if not lease]

    @property
    def _snapshot_key(self) -> str:
        return self._keys.snapshot(self.node, self._epoch)

    @property
    def _lease_millis(self) -> int:
        return int(1000 * self._times.lease_seconds)


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error(
            "a defect ended the writing of a pool to the directory of cached prefixes",
            exc_info=error,
        )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


T = TypeVar("T")


async def in_turns(work: Generator[None, None, T]) -> T:
    """Runs a generator to its end and returns its result. Other tasks run whenever it yields."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            value: T = end.value
            return value
        await asyncio.sleep(0)
