"""Makes clients of the package `redis`. It is optional, so this module is imported only if a URL is
set.
"""

import socket
import ssl
from collections.abc import Iterator
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

SOCKET_SECONDS = 0.5

_REFUSED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
    exceptions.NoPermissionError,
)


async def connect(url: str, *, blocking: bool) -> Redis | RedisCluster:
    """Connects to a server or a cluster. Calls are not retried. `blocking` removes the time limit
    of socket operations.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": SOCKET_SECONDS,
        "socket_timeout": None if blocking else SOCKET_SECONDS,
    }
    single: Redis = Redis.from_url(url, **options)
    try:
        if not await _is_cluster(single):
            return single
    except BaseException:
        await single.aclose()
        raise
    await single.aclose()
    return RedisCluster.from_url(url, require_full_coverage=False, **options)


def why_unusable(error: BaseException) -> str | None:
    """Explains what is wrong with URL, password or certificate. None if a retry may succeed."""
    for cause in _causes(error):
        if isinstance(cause, _REFUSED):
            return f"Redis refuses user or password ({cause})"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the certificate of Redis is not accepted ({cause.verify_message})"
        if isinstance(cause, ssl.SSLError):
            return (
                f"TLS with Redis failed: {(cause.reason or str(cause)).replace('_', ' ').lower()}"
            )
        if isinstance(cause, socket.gaierror):
            # EAI_AGAIN means that no name server replied, so the host may exist.
            return None if cause.errno == socket.EAI_AGAIN else "the host name does not exist"
        if isinstance(cause, exceptions.InvalidResponse):
            return "the server at this address is not Redis"
    return None


async def _is_cluster(client: Redis) -> bool:
    try:
        return bool((await client.info("cluster")).get("cluster_enabled"))
    except exceptions.NoPermissionError:  # the Redis user may not run INFO
        return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
