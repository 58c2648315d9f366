"""Makes the store of API keys that the settings name."""

from services.common.process.settings import SettingError
from services.common.redis.url import NEEDS_REDIS
from services.gateway.options.tenants.keys.file_keys import FileKeys
from services.gateway.options.tenants.keys.store import KeyStore
from services.gateway.settings import GatewaySettings


def make_key_store(settings: GatewaySettings) -> KeyStore | None:
    """Makes the store of API keys. Returns None if the settings name no store. Raises SettingError
    if the settings conflict.
    """
    share_cache = settings.share_cache_between_tenants
    if settings.api_key_file is not None:
        if settings.api_keys_in_redis:
            raise SettingError("--api-key-file and --api-keys-in-redis exclude each other")
        return FileKeys(settings.api_key_file, share_cache=share_cache)
    if not settings.api_keys_in_redis:
        return None
    if settings.redis_url is None:
        raise SettingError("--api-keys-in-redis needs --redis-url")
    try:
        from services.common.redis.connection import RedisConnection  # noqa: PLC0415 - an extra
        from services.gateway.options.tenants.keys.redis_keys import RedisKeys  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SettingError(NEEDS_REDIS) from error
    return RedisKeys(
        RedisConnection(settings.redis_url),
        cache_seconds=settings.api_key_cache_seconds,
        share_cache=share_cache,
    )
