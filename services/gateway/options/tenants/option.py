"""The option that adds tenants to the gateway."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self

from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from services.common.errors import StepwellError
from services.common.process.settings import FileItems, SettingError
from services.common.redis.connection import RedisConnection
from services.common.rpc.server import Context
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.request.generation import Generation
from services.gateway.options.option import Option, OptionParts
from services.gateway.options.tenants.core.limits.cached_estimate import CachedEstimate
from services.gateway.options.tenants.core.limits.memory_limits import MemoryLimits
from services.gateway.options.tenants.core.limits.tenant_limits import (
    ALLOWANCE,
    LimitStore,
    TenantLimits,
    was_refused,
)
from services.gateway.options.tenants.core.queues.capacity import capacity_of
from services.gateway.options.tenants.core.queues.queue_bounds import QueueBounds
from services.gateway.options.tenants.core.queues.tenant_queues import TenantQueues
from services.gateway.options.tenants.keys.api_keys import ApiKeys
from services.gateway.options.tenants.keys.file_keys import FileKeys, follow_plain_keys
from services.gateway.options.tenants.keys.redis_keys import RedisKeys
from services.gateway.options.tenants.keys.store import KeyStore
from services.gateway.options.tenants.limits.http_checks import (
    RATE_LIMIT_HEADERS,
    TenantChecks,
    rate_limit_headers,
)
from services.gateway.options.tenants.metrics import SPECS, TenantMetrics, TenantQueueCollector
from services.gateway.options.tenants.settings import TenantSettings


def make_key_store(settings: TenantSettings, redis_url: str | None) -> KeyStore | None:
    """Makes the store of API keys, or returns None if the settings name no store. Raises
    SettingError if the settings conflict, or if the package for Redis is missing.
    """
    share_cache = settings.share_cache_between_tenants
    if settings.api_key_file is not None:
        if settings.api_keys_in_redis:
            raise SettingError("--api-key-file and --api-keys-in-redis exclude each other")
        return FileKeys(settings.api_key_file, share_cache=share_cache)
    if not settings.api_keys_in_redis:
        return None
    if redis_url is None:
        raise SettingError("--api-keys-in-redis needs --redis-url")
    return RedisKeys(
        RedisConnection(redis_url),
        cache_seconds=settings.api_key_cache_seconds,
        share_cache=share_cache,
    )


def make_limit_store(redis_url: str | None, process_name: str) -> LimitStore:
    """Makes the store of tenants' limits. It is in Redis if `redis_url` is given, and otherwise in
    memory. Raises SettingError if the package for Redis is missing.
    """
    local = MemoryLimits(lambda: time.monotonic_ns() // 1_000_000)
    if redis_url is None:
        return local
    redis = RedisConnection(redis_url)
    from services.gateway.options.tenants.limits.redis_limits import RedisLimits  # noqa: PLC0415

    return RedisLimits(redis, process_name, local)


_WAIT_REASON = "limits"


class Tenants(Option):
    """Requires API keys if the settings name any, and limits the requests of each key's tenant."""

    metric_specs = SPECS
    answer_headers = RATE_LIMIT_HEADERS

    def __init__(self, settings: TenantSettings, parts: OptionParts) -> None:
        self._store = make_key_store(settings, parts.redis_url)
        self._plain = settings.api_keys
        self.access = self._keys = ApiKeys(
            self._plain, self._store, share_cache=settings.share_cache_between_tenants
        )
        self.limit_store = make_limit_store(
            None if self._store is None else parts.redis_url, parts.gateway_id
        )
        fleet = parts.engine
        membership = fleet.membership
        estimate = CachedEstimate(parts.prefix_index, lambda: membership.replicas)
        if self._store is not None and parts.redis_url is not None:
            self.redis_uses = {"limits of tenants": "each gateway applies its part of the limits"}
            if settings.api_keys_in_redis:
                self.redis_uses |= {"API keys": "only keys that were used recently work"}
        self._limits = TenantLimits(self.limit_store, parts.gateway_id, estimate.num_cached_tokens)
        self._is_first, self._observer = parts.is_first, parts.observer
        self._max_body_bytes = parts.settings.max_body_bytes
        fleet.admission = queues = TenantQueues(
            parts.clock,
            QueueBounds(
                settings.max_num_waiting_per_tenant,
                parts.settings.max_concurrent_requests // 2,
                settings.max_queue_seconds_per_tenant,
            ),
            fleet.arrivals,
            capacity=lambda: capacity_of(membership.ready()),
            send=fleet.send,
        )
        metrics = TenantMetrics(parts.inference.model_name)
        parts.observer.listeners.append(metrics)
        self._collectors = (metrics, TenantQueueCollector(queues))
        if self._keys.needs_key:
            self.private_labels = ("tenant",)

    @property
    def collectors(self) -> Sequence[Collector]:
        return self._collectors

    def guarded(self, app: ASGIApp, paths: Collection[str]) -> ASGIApp:
        if not self._keys.needs_key:
            return app
        return TenantChecks(
            app, paths, self._keys, self._limits, self._observer, self._max_body_bytes
        )

    def admitted(
        self, record: RequestRecord, context: Context | None
    ) -> AbstractAsyncContextManager[None] | None:
        return self._limited(record, context) if self._keys.needs_key else None

    @asynccontextmanager
    async def _limited(self, record: RequestRecord, context: Context | None) -> AsyncIterator[None]:
        """Counts a call towards its tenant's limits while the `async with` block runs. The trailing
        metadata of a successful call contains the remaining amounts of the limits.
        """
        with self._observer.counting_refusals(record, record.caller):
            allowance = await self._limits.admit(record.caller)
        if allowance is None:
            yield
            return
        refused = False
        ALLOWANCE.set(allowance)
        try:
            yield
            if context is not None:
                left = rate_limit_headers(allowance.limits, allowance.standing)
                context.set_trailing_metadata(tuple(left))
        except StepwellError as error:
            refused = was_refused(error)
            raise
        finally:
            # `reset` would raise in the task that ends the turn of a client that stopped reading.
            ALLOWANCE.set(None)
            allowance.close(record.generation, was_refused=refused)

    async def before_queue(
        self,
        generation: Generation,
        record: RequestRecord,
        api: str,  # noqa: ARG002
    ) -> Generation:
        """Reserves the request's tokens in the tenant's limit on tokens per minute."""
        if (allowance := ALLOWANCE.get()) is not None:
            record.wait(_WAIT_REASON)
            await allowance.reserve(generation)
        return generation

    def join(self, first: Self) -> None:
        """Counts the requests of all models towards the same limits."""
        self.limit_store = self._limits.store = first.limit_store

    async def require_usable(self) -> None:
        if self._store is not None:
            await self._store.require_usable()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().run())
            if isinstance(self._plain, FileItems):
                tasks.create_task(follow_plain_keys(self._plain, self._keys.set_plain))
            if self._store is not None:
                tasks.create_task(self._store.run())
                if self._is_first:
                    tasks.create_task(self.limit_store.run())
