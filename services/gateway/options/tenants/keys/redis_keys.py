"""API keys in Redis. Keys that clients have used are cached in memory.

1. Keys that are not in memory are looked up together, with one call at a time, which takes at most
   LOOK_UP_SECONDS. So the number of clients with new or wrong keys is not limited.
2. Every REFRESH_SECONDS, the version number of the keys in Redis is read. If it has changed, the
   keys in memory are read again. So a key is refused at most REFRESH_SECONDS after it was revoked.
3. While Redis is unreachable, or after it has lost its data, keys in memory are accepted for
   `cache_seconds`. A request with a key that is not in memory fails with Unavailable, and not with
   Unauthenticated, because the key may exist in Redis.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping

from services.common.errors import Unavailable
from services.common.keys.book_redis import LookUp, look_up
from services.common.recent import Recent
from services.common.redis.connection import RedisConnection, RedisUnavailable
from services.gateway.options.tenants.keys.store import KnownKey

LOOK_UP_SECONDS = 0.3
REFRESH_SECONDS = 1.0
_LOST_SECONDS = 0.25
_MAX_KEYS = 65_536
_KEYS_PER_CALL = 256

logger = logging.getLogger(__name__)


class RedisKeys:
    """A KeyStore in Redis. When `run` is cancelled, it closes the connection."""

    def __init__(self, redis: RedisConnection, *, cache_seconds: float, share_cache: bool) -> None:
        self._redis = redis
        self._cache_seconds = cache_seconds
        self._share_cache = share_cache
        self._keys: Recent[str, KnownKey] = Recent(_MAX_KEYS)
        self._version: str | None = None
        """The version number of the keys in memory, or None if the keys must be read again."""
        self._contact_at = asyncio.get_running_loop().time()
        self._is_lost = False
        self._calling = asyncio.Lock()
        """Locked while keys are read from Redis, so that no older record replaces a newer one."""
        self._next: set[str] = set()
        """The ids of the keys that the next call looks up."""
        self._look_up: asyncio.Task[Mapping[str, KnownKey] | None] | None = None
        """The task that looks up the keys in `_next`."""

    def known(self, key_id: str) -> KnownKey | None:
        return self._keys.get(key_id)

    async def find(self, key_id: str) -> KnownKey | None:
        if self._is_lost:
            raise _keys_unavailable()
        if not self._next:
            self._look_up = asyncio.create_task(self._look_up_next())
        self._next.add(key_id)
        assert self._look_up is not None
        found = await asyncio.shield(self._look_up)
        if found is None:
            raise _keys_unavailable()
        return found.get(key_id)

    async def _look_up_next(self) -> Mapping[str, KnownKey] | None:
        """Looks up the keys in `_next`. Returns those that exist, or None if Redis fails."""
        async with self._calling:
            key_ids, self._next = self._next, set()
            if self._is_lost:
                return None
            try:
                answer = await look_up(self._redis, tuple(key_ids), LOOK_UP_SECONDS)
            except RedisUnavailable as error:
                self._lost(str(error))
                return None
            if not answer.version and self._keys:
                return None
            if answer.version != self._version:
                self._version = None  # The keys in memory may be outdated.
            return self._take(answer, key_ids)

    async def require_usable(self) -> None:
        await self._redis.require_usable()

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(_LOST_SECONDS if self._is_lost else REFRESH_SECONDS)
                try:
                    async with self._calling:
                        await self._refresh()
                except RedisUnavailable as error:
                    self._lost(str(error))
                if asyncio.get_running_loop().time() > self._contact_at + self._cache_seconds:
                    self._keys.clear()
        finally:
            await self._redis.close()

    async def _refresh(self) -> None:
        """Reads the keys in memory from Redis again if they may have changed there."""
        version = (await look_up(self._redis, ())).version
        if not version and self._keys:
            self._lost("Redis has no API keys any more")
            return
        if version != self._version:
            key_ids = list(self._keys)
            for start in range(0, len(key_ids), _KEYS_PER_CALL):
                part = key_ids[start : start + _KEYS_PER_CALL]
                self._take(await look_up(self._redis, part), part)
            self._version = version
        if self._is_lost:
            logger.info("API keys can be looked up in Redis again")
        self._is_lost = False
        self._contact_at = asyncio.get_running_loop().time()

    def _take(self, answer: LookUp, key_ids: Iterable[str]) -> Mapping[str, KnownKey]:
        """Replaces keys in memory. Returns those that exist."""
        found = {
            key_id: KnownKey.of(*records, share_cache=self._share_cache)
            for key_id, records in answer.found.items()
        }
        for key_id in key_ids:
            self._keys.pop(key_id, None)
        self._keys.update(found)
        if answer.damaged:
            logger.error("%d records of API keys in Redis are damaged", answer.damaged)
        return found

    def _lost(self, why: str) -> None:
        if not self._is_lost:
            logger.warning(
                "API keys cannot be looked up in Redis; %d recently used keys stay valid for %.0f "
                "s: %s",
                len(self._keys),
                self._cache_seconds,
                why,
            )
        self._is_lost = True


def _keys_unavailable() -> Unavailable:
    return Unavailable(
        "this API key cannot be checked now, since Redis does not answer; try again later",
        reason="API_KEYS_UNAVAILABLE",
        retry_after_seconds=1.0,
    )
