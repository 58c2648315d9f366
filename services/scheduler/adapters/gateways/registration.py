"""Registers the scheduler in Redis, where gateways find it, if the settings enable this."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.errors import Unavailable
from services.common.process.settings import SettingError
from services.common.redis.connection import RedisConnection
from services.common.redis.fleet_registry import (
    RENEW_SECONDS,
    FleetRegistry,
    RegisteredReplica,
)
from services.common.rpc.addresses import is_on_this_machine, is_unix_address, is_wildcard
from services.common.telemetry.metric_specs import replica, single
from services.scheduler.settings import SchedulerSettings

LEAVE_SECONDS = 0.3
"""Limit on the wait for Redis at the drain. Without a reply, the registration expires by itself."""

logger = logging.getLogger(__name__)


class Registration(Collector):
    """Keeps this scheduler's record in the registry of Redis from `run` to `leave`. Serving
    requests does not wait for Redis. A failed registration is tried again a second later.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        """Raises SettingError if gateways cannot reach the address, or if a package is missing."""
        _require_usable_address(settings)
        self._advertised = settings.advertise_address
        self._redis = None if settings.redis_url is None else RedisConnection(settings.redis_url)
        self._registry: FleetRegistry | None = None
        self._replica: RegisteredReplica | None = None
        self._is_registered = False
        self._num_failures = 0

    async def require_usable(self) -> None:
        """Raises SettingError if no Redis is at the URL, or if it refuses the password."""
        if self._redis is not None:
            await self._redis.require_usable()

    async def run(self, address: str, model_name: str, node: str) -> None:
        """Writes the record and renews its lease until cancelled. `address` is the address on which
        the scheduler listens. `node` is the pool's name in the directory of cached blocks.
        """
        if self._redis is None:
            return
        self._registry = FleetRegistry(self._redis, model_name)
        self._replica = RegisteredReplica(self._advertised or address, node)
        while True:
            try:
                await self._registry.renew(self._replica)
            except Unavailable as error:
                self._failed(error)
            else:
                self._succeeded(self._replica.address, model_name)
            await asyncio.sleep(RENEW_SECONDS)

    async def leave(self) -> None:
        """Removes the record, if Redis replies in time. `run` must have been cancelled."""
        if self._registry is not None and self._replica is not None:
            with suppress(Unavailable):  # the record expires by itself
                await self._registry.remove(self._replica, LEAVE_SECONDS)
                logger.info(
                    "removed from the registry in Redis: gateways no longer find this scheduler"
                )
        self._is_registered = False

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.close()

    def collect(self) -> Iterator[Metric]:
        """The metrics of the registration, if the settings enable it."""
        if self._redis is None:
            return
        yield single(replica.REGISTRATION_UP, self._is_registered)
        yield single(replica.REGISTRATION_FAILURES, self._num_failures)

    def _failed(self, error: Unavailable) -> None:
        if self._is_registered or not self._num_failures:
            logger.warning("this scheduler cannot be registered in Redis: %s", error)
        self._is_registered = False
        self._num_failures += 1

    def _succeeded(self, address: str, model_name: str) -> None:
        if not self._is_registered:
            only = " on this machine" if is_on_this_machine(address) else ""
            logger.info(
                "registered address %s in Redis, for gateways%s that serve model %s",
                address,
                only,
                model_name,
            )
        self._is_registered = True


def _require_usable_address(settings: SchedulerSettings) -> None:
    """Raises SettingError if gateways cannot reach the address, or if there is no Redis for it."""
    if settings.redis_url is None:
        if settings.advertise_address is not None:
            raise SettingError(
                "--advertise-address needs --redis-url: the address is registered in Redis"
            )
        return
    address = settings.address
    if settings.advertise_address is None and (is_unix_address(address) or is_wildcard(address)):
        raise SettingError(
            "--advertise-address must be given with --redis-url: gateways on other machines cannot "
            f"reach this scheduler at {address}"
        )
