"""Redis servers for tests, which are skipped if the program redis-server is not installed."""

import importlib.util

import pytest

from benchmarks.common.redis_servers import (
    NO_SERVER,
    RedisServer,
    find_program,
    free_port,
    redis_cluster,
    redis_server,
)
from tests.waiting import until

__all__ = ["RedisServer", "free_port", "needs_redis", "redis_cluster", "redis_server", "until"]

SECONDS = 60.0

needs_redis = pytest.mark.skipif(
    find_program("redis-server") is None or importlib.util.find_spec("redis") is None,
    reason=NO_SERVER,
)
