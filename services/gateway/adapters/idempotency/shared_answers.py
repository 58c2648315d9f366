"""Builds the sharing of answers between gateways if Redis is configured."""

from services.common.process.settings import SettingError
from services.common.redis.url import NEEDS_REDIS
from services.gateway.core.idempotency.sharing import Sharing, SharingTimes
from services.gateway.core.ports import Clock


def make_sharing(
    redis_url: str | None, gateway: str, clock: Clock, retention_seconds: float
) -> Sharing | None:
    """Sharing through Redis; None without a URL. Raises SettingError if the package
    for Redis is missing.
    """
    if redis_url is None:
        return None
    try:
        from services.common.redis.connection import RedisConnection  # noqa: PLC0415 - an extra
        from services.gateway.adapters.idempotency.redis_journal import (  # noqa: PLC0415
            RedisJournal,
        )
    except ModuleNotFoundError as error:
        raise SettingError(NEEDS_REDIS) from error
    times = SharingTimes()
    journal = RedisJournal(
        RedisConnection(redis_url),
        gateway,
        lease_seconds=times.lease_seconds,
        retention_seconds=retention_seconds,
    )
    return Sharing(journal, gateway, clock, times)
