"""Chooses where tenants' requests and tokens are counted: in Redis if it is configured, and
otherwise in this process.
"""

import time

from services.common.process.settings import SettingError
from services.common.redis.url import NEEDS_REDIS
from services.gateway.options.tenants.core.limits.memory_limits import MemoryLimits
from services.gateway.options.tenants.core.limits.store import LimitStore


def make_limit_store(redis_url: str | None, process_name: str) -> LimitStore:
    """Makes the store. It is in Redis if a URL is given. Raises SettingError if the package for
    Redis is missing.
    """
    local = MemoryLimits(lambda: time.monotonic_ns() // 1_000_000)
    if redis_url is None:
        return local
    try:
        from services.common.redis.connection import RedisConnection  # noqa: PLC0415 - an extra
        from services.gateway.options.tenants.limits.redis_limits import RedisLimits  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SettingError(NEEDS_REDIS) from error
    return RedisLimits(RedisConnection(redis_url), process_name, local)
