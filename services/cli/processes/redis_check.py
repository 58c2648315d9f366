"""Checks that Redis answers before the services are started with it."""

import asyncio

from services.cli.errors import CommandError
from services.common.redis.url import NEEDS_REDIS, missing_file, without_secrets


def require_redis(url: str) -> None:
    """Raises CommandError if no Redis answers at a URL or if Redis refuses the password.

    The services themselves tolerate an unreachable Redis, which may return later.
    """
    try:
        from services.common.redis.connection import (  # noqa: PLC0415 - an extra
            FIRST_CALL_SECONDS,
            RedisConnection,
            RedisUnavailable,
            why_unusable,
        )
    except ModuleNotFoundError as error:
        raise CommandError(NEEDS_REDIS.replace("--redis-url", "--redis")) from error

    if (complaint := missing_file(url)) is not None:
        raise CommandError(f"--redis-url {without_secrets(url)}: {complaint}", exit_status=2)

    async def ask() -> None:
        connection = RedisConnection(url)
        try:
            await connection.call(lambda client: client.ping(), FIRST_CALL_SECONDS)
        finally:
            await connection.close()

    try:
        asyncio.run(ask())
    except RedisUnavailable as error:
        complaint = why_unusable(error) or "nothing answers there"
        raise CommandError(f"--redis-url {without_secrets(url)}: {complaint}") from error
