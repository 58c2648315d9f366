"""Counts tenants' requests and tokens in Redis, for all gateways together. While Redis is
unreachable, each gateway applies its own part of the limits.

No request fails because of Redis, or waits for one call of Redis longer than TAKE_SECONDS. Each
gateway has a lease in Redis, by which gateways are counted. After a failed call, a gateway counts
in memory until it has renewed its lease. It then applies each limit divided by the last known
number of gateways, and starts from the tenant's last levels (remaining amounts) in Redis, also
divided by this number.
"""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import NoScriptError

from services.common.redis.connection import Client, RedisConnection, RedisUnavailable
from services.gateway.options.tenants.core.limits.memory_limits import MemoryLimits
from services.gateway.options.tenants.core.limits.rule import (
    Change,
    LimitSet,
    Quota,
    SlotChange,
    Standing,
)
from services.gateway.options.tenants.limits.scripts import GATEWAYS, HOLD, LEASE, TAKE, tenant_keys

TAKE_SECONDS = 0.04
RENEW_SECONDS = 1.0
_LOST_SECONDS = 0.25
_RENEW_CALL_SECONDS = 0.2
_LEASE_MILLIS = 3000
"""Milliseconds without a renewal of its lease after which a gateway is not counted."""
SLOT_LEASE_MILLIS = 15_000
_SLOTS_PER_CALL = 500
_MAX_UNRELEASED = 10_000
_MAX_CALLS = 16
"""Limit on the number of concurrent calls for requests. Each call uses its own connection."""
_QUOTAS = (None, Quota.REQUESTS, Quota.TOKENS, Quota.CONCURRENCY)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RedisLimits:
    """A LimitStore in Redis. When `run` is cancelled, it closes the connection.

    Each concurrent request of a tenant occupies a slot, which has a lease in Redis. This gateway's
    slots are also in `local`, and this gateway renews their leases. While Redis is unreachable,
    only the slots in `local` are counted.
    """

    def __init__(
        self,
        redis: RedisConnection,
        process_name: str,
        local: MemoryLimits,
        *,
        take_seconds: float = TAKE_SECONDS,
        slot_lease_millis: int = SLOT_LEASE_MILLIS,
    ) -> None:
        """Slots must not expire in `local`. No request waits for Redis longer than `take_seconds`.
        The slots of a dead gateway expire in Redis after `slot_lease_millis`.
        """
        self._take_seconds = take_seconds
        self._slot_lease_millis = slot_lease_millis
        self.num_gateways = 1
        self._redis = redis
        self._process_name = process_name
        self._local = local
        self._is_lost = False
        self._last: dict[str, Standing] = {}
        """Maps tenants' ids to the levels (remaining amounts) in the last answer from Redis."""
        self._unreleased: deque[tuple[LimitSet, str]] = deque(maxlen=_MAX_UNRELEASED)
        """Slots that no request uses any more, but that may still be occupied in Redis."""
        self._in_flight = asyncio.Semaphore(_MAX_CALLS)
        self._changing: set[asyncio.Task[Any]] = set()
        """Tasks that make changes in Redis, which `run` awaits at its end."""

    @property
    def is_lost(self) -> bool:
        """Whether this gateway counts alone, because Redis is unreachable."""
        return self._is_lost

    async def take(self, limits: LimitSet, change: Change) -> Standing:
        """If the caller is cancelled, the change is still made, and then undone."""
        if self._is_lost:
            return self._take_locally(limits, change)
        taking = self._begin(self._take(limits, change))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(partial(self._undo, limits, change))
            raise

    def give_back(self, limits: LimitSet, change: Change) -> None:
        if self._is_lost:
            self._local.give_back(limits.divided(self.num_gateways), change)
            if change.slot_change is SlotChange.RELEASE:
                self._unreleased.append((limits, change.slot))
            return
        self._mirror_slot(limits, change)
        self._begin(self._send(limits, change))

    async def _take(self, limits: LimitSet, change: Change) -> Standing:
        try:
            standing = await self._change_in_turn(limits, change)
        except RedisUnavailable as error:
            self._lost(error)
            standing = self._take_locally(limits, change)
            if standing.refused_by is not None and change.slot_change is SlotChange.HOLD:
                self._unreleased.append((limits, change.slot))
            return standing
        self._last[limits.tenant_id] = standing
        if standing.refused_by is None:
            self._mirror_slot(limits, change)
        return standing

    def _undo(self, limits: LimitSet, change: Change, taking: asyncio.Task[Standing]) -> None:
        if taking.cancelled() or taking.exception() or taking.result().refused_by is not None:
            return
        held = change.slot_change is SlotChange.HOLD
        back = Change(
            change.slot,
            -change.num_requests,
            -change.num_tokens,
            SlotChange.RELEASE if held else SlotChange.KEEP,
            must_fit=False,
        )
        self.give_back(limits, back)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return task

    async def run(self) -> None:
        """Renews the leases of this gateway and of its slots until cancelled."""
        loop, slots_at = asyncio.get_running_loop(), 0.0
        slots_seconds = self._slot_lease_millis / 3000
        renew_seconds = min(RENEW_SECONDS, slots_seconds)
        try:
            while True:
                try:
                    await self._renew()
                    if loop.time() >= slots_at:
                        slots_at = loop.time() + slots_seconds
                        await self._hold_slots()
                except RedisUnavailable as error:
                    self._lost(error)
                    slots_at = 0.0
                await asyncio.sleep(_LOST_SECONDS if self._is_lost else renew_seconds)
        finally:
            while self._changing:
                await asyncio.wait(self._changing)
            await self._redis.close()

    def _take_locally(self, limits: LimitSet, change: Change) -> Standing:
        share = limits.divided(self.num_gateways)
        last = self._last.get(limits.tenant_id)
        if last is not None:
            requests, tokens = last.requests_level, last.tokens_level
            self._local.begin(share, requests // self.num_gateways, tokens // self.num_gateways)
        return self._local.apply(share, change)

    def _mirror_slot(self, limits: LimitSet, change: Change) -> None:
        if change.slot_change is not SlotChange.KEEP:
            slot = Change(change.slot, slot_change=change.slot_change, must_fit=False)
            self._local.apply(LimitSet(limits.tenant_id), slot)

    async def _send(self, limits: LimitSet, change: Change) -> None:
        try:
            self._last[limits.tenant_id] = await self._change_in_turn(limits, change)
        except RedisUnavailable as error:
            self._lost(error)
            if change.slot_change is SlotChange.RELEASE:
                self._unreleased.append((limits, change.slot))

    async def _change_in_turn(self, limits: LimitSet, change: Change) -> Standing:
        """Makes a change after earlier changes of a burst. The time until then does not count
        towards the time limit, because it does not show that Redis is slow.
        """
        async with self._in_flight:
            if self._is_lost:
                raise RedisUnavailable("an earlier call to Redis has failed")
            return await self._change(limits, change)

    async def _change(self, limits: LimitSet, change: Change) -> Standing:
        refused_by, wait, requests, tokens, num_slots, now = await self._call(
            TAKE,
            tenant_keys(limits.tenant_id),
            (
                limits.requests_per_minute or 0,
                limits.tokens_per_minute or 0,
                change.num_requests,
                change.num_tokens,
                limits.max_concurrent_requests or 0,
                change.slot,
                change.slot_change.value,
                int(change.must_fit),
                self._slot_lease_millis,
            ),
            self._take_seconds,
        )
        return Standing(_QUOTAS[refused_by], wait, requests, tokens, num_slots, now)

    async def _renew(self) -> None:
        """Renews this gateway's lease. Success shows that Redis is reachable."""
        arguments = (_LEASE_MILLIS, self._process_name)
        num_gateways = await self._call(LEASE, (GATEWAYS,), arguments, _RENEW_CALL_SECONDS)
        if self._is_lost:  # Checks that Redis also responds within the time limit of requests.
            num_gateways = await self._call(LEASE, (GATEWAYS,), arguments, self._take_seconds)
        self.num_gateways = max(1, num_gateways)
        if self._is_lost:
            logger.info(
                "tenants' limits are counted in Redis again, by %d gateways", self.num_gateways
            )
            self._is_lost = False
            self._local.forget_levels()
        while self._unreleased:
            limits, slot = self._unreleased.popleft()
            release = Change(slot, slot_change=SlotChange.RELEASE, must_fit=False)
            await self._change(limits, release)

    async def _hold_slots(self) -> None:
        """Renews the leases of running requests' slots. Restores slots that Redis has lost. A slot
        that is released during its renewal may be occupied again, so it is released again.
        """
        for tenant_id, slots in self._local.slots().items():
            _, key = tenant_keys(tenant_id)
            names = list(slots)
            for start in range(0, len(names), _SLOTS_PER_CALL):
                part = names[start : start + _SLOTS_PER_CALL]
                arguments = (self._slot_lease_millis, *part)
                await self._call(HOLD, (key,), arguments, _RENEW_CALL_SECONDS)
                if released := [name for name in part if name not in slots]:
                    await self._redis.pipeline([("ZREM", key, *released)], _RENEW_CALL_SECONDS)

    async def _call(
        self, script: str, keys: tuple[str, ...], arguments: tuple[Any, ...], seconds: float
    ) -> Any:
        return await self._redis.call(
            lambda client: _evaluate(client, script, keys, arguments), seconds
        )

    def _lost(self, error: RedisUnavailable) -> None:
        if not self._is_lost:
            logger.warning(
                "tenants' limits cannot be counted in Redis, so each of %d gateways applies its "
                "share: %s",
                self.num_gateways,
                error,
            )
        self._is_lost = True


_DIGESTS = {script: hashlib.sha1(script.encode()).hexdigest() for script in (TAKE, HOLD, LEASE)}


async def _evaluate(
    client: Client, script: str, keys: tuple[str, ...], arguments: tuple[Any, ...]
) -> Any:
    """Runs a Lua script by its digest. Sends the whole script if Redis does not know it."""
    run: Awaitable[Any] = client.evalsha(_DIGESTS[script], len(keys), *keys, *arguments)
    try:
        return await run
    except NoScriptError:
        return await client.eval(script, len(keys), *keys, *arguments)
