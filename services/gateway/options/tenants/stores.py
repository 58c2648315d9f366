"""Makes the stores of API keys and of limits that the settings name: Redis, a file or memory."""

import time

from services.common.process.settings import SettingError
from services.common.redis.url import NEEDS_REDIS
from services.gateway.options.tenants.core.limits.memory_limits import MemoryLimits
from services.gateway.options.tenants.core.limits.store import LimitStore
from services.gateway.options.tenants.keys.file_keys import FileKeys
from services.gateway.options.tenants.keys.store import KeyStore
from services.gateway.options.tenants.settings import TenantSettings


def make_key_store(settings: TenantSettings, redis_url: str | None) -> KeyStore | None:
    """Makes the store of API keys. Returns None if the settings name no store. Raises SettingError
    if the settings conflict, or if the package for Redis is missing.
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
    try:
        from services.common.redis.connection import RedisConnection  # noqa: PLC0415 - an extra
        from services.gateway.options.tenants.keys.redis_keys import RedisKeys  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SettingError(NEEDS_REDIS) from error
    return RedisKeys(
        RedisConnection(redis_url),
        cache_seconds=settings.api_key_cache_seconds,
        share_cache=share_cache,
    )


def make_limit_store(redis_url: str | None, process_name: str) -> LimitStore:
    """Makes the store of limits. It is in Redis if a URL is given. Raises SettingError if the
    package for Redis is missing.
    """
    local = MemoryLimits(lambda: time.monotonic_ns() // 1_000_000)
    if redis_url is None:
        return local
    try:
        from services.common.redis.connection import RedisConnection  # noqa: PLC0415 - an extra
        from services.gateway.options.tenants.limits.redis_limits import (  # noqa: PLC0415
            RedisLimits,
        )
    except ModuleNotFoundError as error:
        raise SettingError(NEEDS_REDIS) from error
    return RedisLimits(RedisConnection(redis_url), process_name, local)
