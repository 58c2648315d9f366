"""Measures how long Redis takes to answer."""

import asyncio
import time
from typing import Any

from services.common.errors import Unavailable
from services.common.redis.connection import RedisConnection


class RedisProbe:
    """Sends a PING when it is asked, over its own connection. Callers at the same time share it."""

    def __init__(self, redis: RedisConnection) -> None:
        self._redis = redis
        self._lock = asyncio.Lock()
        self._sent_at = 0.0
        self._found: dict[str, Any] = {}

    async def look(self, max_age_seconds: float) -> dict[str, Any]:
        """Returns the name of Redis, and the seconds of a PING or the error."""
        async with self._lock:
            if not self._found or time.monotonic() >= self._sent_at + max_age_seconds:
                self._found = {"address": self._redis.name, "seconds": None, "error": ""}
                try:
                    await self._redis.call(lambda client: client.ping())  # connects if necessary
                    began = time.perf_counter()
                    await self._redis.call(lambda client: client.ping())
                    self._found["seconds"] = time.perf_counter() - began
                except Unavailable as error:
                    self._found["error"] = str(error)
                self._sent_at = time.monotonic()
            return dict(self._found)

    async def close(self) -> None:
        await self._redis.close()
