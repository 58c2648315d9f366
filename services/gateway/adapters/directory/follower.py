"""Keeps the index up to date, from Redis where there is one, else from the pools themselves."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from services.common.process.settings import SettingError
from services.common.redis.url import NEEDS_REDIS
from services.gateway.adapters.directory.counts import ReaderCounts
from services.gateway.adapters.directory.pool_watchers import PoolAddress, PoolWatchers
from services.gateway.adapters.directory.sweeper import sweep
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription
from services.gateway.core.prefix_index.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from services.common.tls.credentials import Tls

Replicas = Callable[[], Iterable[Replica]]


class Follower(Protocol):
    """Follows what the pools of replicas cache."""

    @property
    def counts(self) -> ReaderCounts:
        """What was read."""
        ...

    async def require_usable(self) -> None:
        """Raises SettingError where a setting is wrong."""
        ...

    async def run(self) -> None:
        """Writes to the index until cancelled."""
        ...


def make_follower(
    index: PrefixIndex, redis_url: str | None, replicas: Replicas, tls: "Tls | None" = None
) -> Follower:
    """What follows the pools of `replicas`, as they are at any time; without Redis with `tls`.

    Raises SettingError where the package for Redis is missing.
    """
    if redis_url is None:
        return PoolFollower(index, replicas, tls)
    return RedisFollower(index, redis_url, replicas)


class RedisFollower:
    """Follows the directory in Redis, of the model that the replicas serve."""

    def __init__(self, index: PrefixIndex, redis_url: str, replicas: Replicas) -> None:
        try:
            from services.common.redis.connection import RedisConnection  # noqa: PLC0415 - an extra
            from services.gateway.adapters.directory.redis_reader import RedisReader  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise SettingError(NEEDS_REDIS) from error
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
        """Of the replicas in use; those that are refused serve another model."""
        return next((served.fingerprint for served in _served(self._replicas())), None)


class PoolFollower:
    """Follows each pool by its own events. One pool alone is not followed: there is no choice to be
    made by what it caches, and each of its steps would send a message.
    """

    def __init__(self, index: PrefixIndex, replicas: Replicas, tls: "Tls | None") -> None:
        self._index = index
        self._replicas = replicas
        self._watchers = PoolWatchers(index, tls)

    @property
    def counts(self) -> ReaderCounts:
        return self._watchers.counts

    async def require_usable(self) -> None:
        """Pools need no settings."""

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
    """What the connected replicas serve that are not refused."""
    for replica in replicas:
        if replica.is_connected and replica.description is not None and not replica.refusal:
            yield replica.description
