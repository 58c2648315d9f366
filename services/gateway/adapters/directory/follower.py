"""Updates the index of cached prefixes. The source is Redis if it is configured, and otherwise the
event streams of the replicas' KV pools.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from services.common.redis.connection import RedisConnection
from services.common.tls.credentials import Tls
from services.gateway.adapters.directory.metrics import ReaderCounts
from services.gateway.adapters.directory.pool_watchers import PoolAddress, PoolWatchers
from services.gateway.adapters.directory.redis_reader import RedisReader
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription
from services.gateway.core.prefix_index.prefix_index import PrefixIndex

Replicas = Callable[[], Iterable[Replica]]
_SWEEP_IDLE_SECONDS = 1.0
_SWEEP_PART_SECONDS = 0.002
"""`sweep` sleeps for _SWEEP_PART_SECONDS between two parts of the index, and for
_SWEEP_IDLE_SECONDS while the index has no invalid entries.
"""


class Follower(Protocol):
    """Mirrors the cached prefixes of the replicas' pools in the index."""

    @property
    def counts(self) -> ReaderCounts: ...

    async def require_usable(self) -> None:
        """Raises SettingError if a setting is wrong."""
        ...

    async def run(self) -> None:
        """Writes to the index until cancelled."""
        ...


def make_follower(
    index: PrefixIndex, redis_url: str | None, replicas: Replicas, tls: Tls | None = None
) -> Follower:
    """Makes the follower of the replicas' pools. It reads from Redis if `redis_url` is set, and
    otherwise from the pools' event streams, with `tls`.

    Raises SettingError if the package for Redis is missing.
    """
    if redis_url is None:
        return PoolFollower(index, replicas, tls)
    return RedisFollower(index, redis_url, replicas)


class RedisFollower:
    """Follows the directory of cached prefixes in Redis, for the gateway's current model."""

    def __init__(self, index: PrefixIndex, redis_url: str, replicas: Replicas) -> None:
        self._index = index
        self._replicas = replicas
        self._redis = RedisConnection(redis_url)
        tail = RedisConnection(redis_url, blocking=True)
        self._reader = RedisReader(index, self._redis, tail)

    @property
    def counts(self) -> ReaderCounts:
        return self._reader.counts

    async def require_usable(self) -> None:
        await self._redis.require_usable()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sweep(self._index))
            tasks.create_task(self._reader.run(self._fingerprint))

    def _fingerprint(self) -> bytes | None:
        """Returns the fingerprint of the gateway's current model. Ignores replicas that are refused
        because they serve another model.
        """
        return next((served.fingerprint for served in _served(self._replicas())), None)


class PoolFollower:
    """Follows the event stream of each pool. If there is only one pool, it is not followed, because
    routing needs no index for one replica, and each step would cost a message.
    """

    def __init__(self, index: PrefixIndex, replicas: Replicas, tls: Tls | None) -> None:
        self._index = index
        self._replicas = replicas
        self._watchers = PoolWatchers(index, tls)

    @property
    def counts(self) -> ReaderCounts:
        return self._watchers.counts

    async def require_usable(self) -> None: ...

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sweep(self._index))
            tasks.create_task(self._watchers.run(self._pools))

    def _pools(self) -> list[PoolAddress]:
        pools = [
            PoolAddress(served.cache_node, served.kvpool_address, served.pool_id)
            for served in _served(self._replicas())
            if served.kvpool_address
        ]
        return pools if len(pools) > 1 else []


def _served(replicas: Iterable[Replica]) -> Iterator[ReplicaDescription]:
    """Yields the descriptions of the connected replicas, except refused replicas, which serve
    another model.
    """
    for replica in replicas:
        if replica.is_connected and replica.description is not None and not replica.refusal:
            yield replica.description


async def sweep(index: PrefixIndex) -> None:
    """Removes invalid entries from the index, part by part, until cancelled. One part takes about a
    millisecond in an index of a million blocks.
    """
    while True:
        more = index.sweep()
        await asyncio.sleep(_SWEEP_PART_SECONDS if more else _SWEEP_IDLE_SECONDS)
