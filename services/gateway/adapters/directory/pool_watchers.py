"""Updates the index of cached prefixes from the KV pools' event streams (the RPC WatchEvents), if
Redis is not configured.

Each pool has a task that reads its stream into the index. The stream begins with a snapshot, and
changes follow. When the stream ends, the pool is removed from the index. The stream is opened again
after a delay that grows with each failure.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.kv_directory import KeyBatch, block_keys
from services.common.pool.messages import kv_cache_group_from_proto
from services.common.rpc.channel import open_channel
from services.common.rpc.status import from_peer
from services.common.tls.credentials import Tls
from services.gateway.adapters.directory.metrics import ReaderCounts
from services.gateway.core.prefix_index.node_view import Applied, DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)

_HASH_BYTES = 32
_HASHES_PER_TURN = 2048
_LOOK_AGAIN_SECONDS = 0.25
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """The address at which a replica's pool publishes its events."""

    node: str
    address: str
    pool_id: str


class PoolWatchers:
    """Mirrors the pools of the known replicas in the index."""

    def __init__(self, index: PrefixIndex, tls: Tls | None = None) -> None:
        self.counts = ReaderCounts()
        self._index = index
        self._tls = tls
        self._epochs = itertools.count(1)

    async def run(self, pools: Callable[[], Iterable[PoolAddress]]) -> None:
        """Follows the pools that `pools` returns, until cancelled. `pools` is called repeatedly.
        While it returns no pools, the index is unused.
        """
        tasks: dict[PoolAddress, asyncio.Task[None]] = {}
        try:
            while True:
                wanted = dict.fromkeys(pools())  # keeps the order, so that runs are reproducible
                self._index.contact = DirectoryState.EXACT if wanted else DirectoryState.UNUSED
                for pool in [pool for pool in tasks if pool not in wanted]:
                    tasks[pool].cancel()
                    await asyncio.gather(tasks.pop(pool), return_exceptions=True)
                for pool in [pool for pool in wanted if pool not in tasks]:
                    tasks[pool] = asyncio.create_task(self._follow(pool))
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                for task in tasks.values():
                    if task.done():  # Only a defect ends a task.
                        task.result()
        finally:
            self._index.contact = DirectoryState.FALLBACK
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _follow(self, pool: PoolAddress) -> None:
        backoff, is_known_lost = _FIRST_BACKOFF_SECONDS, False
        async with open_channel(pool.address, self._tls) as channel:
            stub = kvpool_pb2_grpc.KVPoolStub(channel)
            while True:
                reader = PoolReader(pool.node, self._index, self._epochs, self.counts)
                try:
                    call = stub.WatchEvents(kvpool_pb2.WatchEventsRequest(pool_id=pool.pool_id))
                    async for message in call:
                        await reader.apply(message)
                        backoff, is_known_lost = _FIRST_BACKOFF_SECONDS, False
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.NOT_FOUND and not is_known_lost:
                        is_known_lost = True
                        why = from_peer("the pool", error)
                        logger.info(
                            "the cached prefixes of pool %s cannot be read: %s", pool.node, why
                        )
                    self.counts.failures += 1
                except Exception as error:
                    logger.warning(
                        "an event of pool %s is wrong: %r",
                        pool.node,
                        error,
                    )
                    self.counts.failures += 1
                finally:
                    self._index.remove(pool.node)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)


class PoolReader:
    """Reads the messages of one pool's stream into the index, where the pool is a node. Each
    snapshot starts a new epoch of the node, which replaces all its keys.
    """

    def __init__(
        self, node: str, index: PrefixIndex, epochs: Iterable[int], counts: ReaderCounts
    ) -> None:
        """`epochs` yields epoch numbers that no other reader of this index uses."""
        self._node = node
        self._index = index
        self._epochs = iter(epochs)
        self._counts = counts
        self._groups: tuple[KVCacheGroup, ...] = ()
        self._epoch = 0

    async def apply(self, message: kvpool_pb2.WatchEventsResponse) -> None:
        """Applies a message. If messages before it are missing, marks the node as degraded: its
        keys may be wrong.
        """
        self._counts.entries += 1
        if message.snapshot:
            groups = [kv_cache_group_from_proto(group) for group in message.groups]
            self._groups = tuple(group for group in groups if group is not None)
            await self._load(message)
            return
        added: dict[int, None] = {}
        removed: dict[int, None] = {}
        for event in message.events:
            match event.WhichOneof("event"):
                case "stored":
                    keys = _keys(event.stored.hashes, event.stored.group)
                    _move(keys, removed, added)
                case "removed":
                    keys = _keys(event.removed.hashes, event.removed.group)
                    _move(keys, added, removed)
                case "cleared":
                    added.clear()
                    removed.clear()
                    self._begin(message.sequence - 1)
        batch = KeyBatch(self._epoch, message.sequence, list(added), list(removed))
        if self._index.apply(batch) is Applied.GAP:
            self._counts.gaps += 1

    async def _load(self, message: kvpool_pb2.WatchEventsResponse) -> None:
        self._epoch = next(self._epochs)
        view = self._node, self._epoch, self._groups, message.sequence
        with self._index.loading(*view) as add:
            for event in message.events:
                stored = event.stored
                step = _HASH_BYTES * _HASHES_PER_TURN
                for at in range(0, len(stored.hashes), step):
                    add(_keys(stored.hashes[at : at + step], stored.group))
                    await asyncio.sleep(0)
        self._counts.loads += 1

    def _begin(self, sequence: int) -> None:
        """Starts a new epoch of the node, without keys, because its pool was reset. `sequence` is
        the number of the last message before the epoch.
        """
        self._epoch = next(self._epochs)
        self._index.begin(self._node, self._epoch, self._groups, sequence)


def _keys(hashes: bytes, group: int) -> list[int]:
    return block_keys(
        (hashes[at : at + _HASH_BYTES] for at in range(0, len(hashes), _HASH_BYTES)), group
    )


def _move(keys: Iterable[int], source: dict[int, None], target: dict[int, None]) -> None:
    """Moves keys from `source` to `target`, so that only the last event of each key in a message
    counts.
    """
    for key in keys:
        source.pop(key, None)
        target[key] = None
