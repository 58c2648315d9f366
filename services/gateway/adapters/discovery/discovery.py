"""Combines the sources of scheduler addresses: the settings, DNS, and the registry in Redis."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.errors import Unavailable
from services.common.redis.connection import RedisConnection
from services.common.redis.fleet_registry import FleetRegistry
from services.common.rpc.addresses import DNS, join_host_port, split_host_port
from services.common.telemetry.metric_specs import edge, value_family

logger = logging.getLogger(__name__)

Look = Callable[[], Awaitable[Iterable[str]]]
SetAddresses = Callable[[str, Iterable[str]], None]


class Watcher:
    """Queries one source of scheduler addresses at intervals. While the source fails, its last
    addresses stay in use.
    """

    def __init__(
        self, source: str, look: Look, set_addresses: SetAddresses, every_seconds: float
    ) -> None:
        """`look` returns the addresses, or raises Unavailable within a bounded time."""
        self.source = source
        self.is_up = False
        self.num_addresses = 0
        self.num_failures = 0
        self._look = look
        self._set_addresses = set_addresses
        self._every_seconds = every_seconds

    async def run(self) -> None:
        while True:
            try:
                addresses = sorted(await self._look())
            except Unavailable as error:
                self._failed(error)
            else:
                self._found(addresses)
            await asyncio.sleep(self._every_seconds)

    def _failed(self, error: Unavailable) -> None:
        if self.is_up or not self.num_failures:
            logger.warning(
                "source %s of schedulers' addresses cannot be read, the known schedulers stay in "
                "use: %s",
                self.source,
                error,
            )
        self.is_up = False
        self.num_failures += 1

    def _found(self, addresses: list[str]) -> None:
        if not self.is_up and self.num_failures:
            logger.info("source %s of schedulers' addresses can be read again", self.source)
        self.is_up = True
        self.num_addresses = len(addresses)
        self._set_addresses(self.source, addresses)


SETTINGS, REDIS = "settings", "redis"
"""Names of sources in logs and metrics. The name of a DNS source is its entry dns:NAME:PORT."""

_DNS_SECONDS, _REGISTRY_SECONDS = 3.0, 1.0
"""Seconds between two queries of DNS, and between two reads of the registry."""


class Discovery(Collector):
    """Finds schedulers in the settings, by names in DNS, and in the registry in Redis."""

    def __init__(
        self,
        schedulers: Sequence[str],
        redis_url: str | None,
        model_name: str,
        set_addresses: SetAddresses,
    ) -> None:
        """Passes the addresses in the settings to `set_addresses` at once. Raises SettingError if
        the package for Redis is missing.
        """
        in_dns = [address for address in schedulers if address.startswith(DNS)]
        set_addresses(SETTINGS, [address for address in schedulers if address not in in_dns])
        self._watchers = [
            Watcher(name, partial(_resolve, name), set_addresses, _DNS_SECONDS) for name in in_dns
        ]
        self._registry = None if redis_url is None else _Registry(redis_url, model_name)
        if self._registry is not None:
            look = self._registry.addresses
            self._watchers.append(Watcher(REDIS, look, set_addresses, _REGISTRY_SECONDS))

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for watcher in self._watchers:
                    tasks.create_task(watcher.run())
                await asyncio.get_running_loop().create_future()
        finally:
            if self._registry is not None:
                await self._registry.close()

    def collect(self) -> Iterator[Metric]:
        up = value_family(edge.DISCOVERY_UP)
        addresses = value_family(edge.DISCOVERY_ADDRESSES)
        failures = value_family(edge.DISCOVERY_FAILURES)
        for watcher in self._watchers:
            up.add_metric([watcher.source], watcher.is_up)
            addresses.add_metric([watcher.source], watcher.num_addresses)
            failures.add_metric([watcher.source], watcher.num_failures)
        yield from (up, addresses, failures)


class _Registry:
    """Reads Redis's registry of the replicas that serve one model, over its own connection."""

    def __init__(self, redis_url: str, model_name: str) -> None:
        self._redis = RedisConnection(redis_url)
        self._registry = FleetRegistry(self._redis, model_name)

    async def addresses(self) -> set[str]:
        return {replica.address for replica in await self._registry.replicas()}

    async def close(self) -> None:
        await self._redis.close()


async def _resolve(value: str) -> set[str]:
    """Returns all addresses of dns:NAME:PORT, each with the port. Raises Unavailable if the
    system's resolver cannot resolve the name, usually after at most a few seconds.
    """
    name, port = split_host_port(value.removeprefix(DNS))
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unavailable(f"{name} cannot be resolved: {error}") from error
    return {join_host_port(str(address[0]), port) for *_, address in found}
