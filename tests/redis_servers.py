"""Redis servers for tests. The tests are skipped if no server program is installed."""

import asyncio
import importlib.util
import time
from collections.abc import Callable

import pytest

from benchmarks.common.redis_servers import (
    NO_SERVER,
    RedisServer,
    find_program,
    free_port,
    redis_cluster,
    redis_server,
)

__all__ = ["RedisServer", "becomes", "free_port", "needs_redis", "redis_cluster", "redis_server"]

SECONDS = 60.0

needs_redis = pytest.mark.skipif(
    find_program("redis-server") is None or importlib.util.find_spec("redis") is None,
    reason=NO_SERVER,
)


async def becomes(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold in time"
        await asyncio.sleep(0.005)
