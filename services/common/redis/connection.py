"""Calls Redis, a single server or a cluster, depending on the URL.

Calls fail within a fraction of a second, since no request may wait for Redis. redis-py's default is
ten retries of five seconds each. Here a call is never retried, and both the whole call and each
socket operation have a time limit. Commands are limited to Redis 6.2 and RESP2. The package `redis`
is optional, so this module is imported only if a URL is set.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.common.errors import Unavailable
from services.common.process.settings import FileText, SettingError
from services.common.redis.url import missing_file, without_secrets

SOCKET_SECONDS = 0.5
CALL_SECONDS = 0.5
FIRST_CALL_SECONDS = 1.0

T = TypeVar("T")
Client = Any  # Redis or RedisCluster. Both have the methods that are used.

_REFUSED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
    exceptions.NoPermissionError,
)

logger = logging.getLogger(__name__)


class RedisUnavailable(Unavailable):
    """Redis failed or did not reply in time. The command may or may not have been executed."""

    reason = "REDIS_UNAVAILABLE"


class RedisConnection:
    """A connection to Redis, which is opened when a call needs it. Calls may overlap.

    After a call that failed, the URL is read again if it came from a file, and so are the
    certificates that the URL names if they were the reason.
    """

    def __init__(self, url: str, *, blocking: bool = False) -> None:
        """`blocking` permits commands that block at the server, by removing the time limit of
        socket operations. Raises SettingError if a file that the URL names is missing.
        """
        self.name = without_secrets(url)
        if (complaint := missing_file(url)) is not None:
            raise SettingError(f"--redis-url {self.name}: {complaint}")
        self._url = url
        self._used_url = url
        self._options: dict[str, Any] = {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": SOCKET_SECONDS,
            "socket_timeout": None if blocking else SOCKET_SECONDS,
        }
        self._client: Client | None = None
        self._connecting = asyncio.Lock()

    async def call(self, use: Callable[[Client], Awaitable[T]], seconds: float = CALL_SECONDS) -> T:
        """Returns the result of `use(client)`. Raises RedisUnavailable on failure or timeout."""
        try:
            async with asyncio.timeout(seconds):
                answer = await use(await self._connected())
        # Every error is caught, because redis-py does not document all errors that it can raise
        # while a cluster changes. Every error means that the call has failed.
        except Exception as error:
            _raise_if_cancelled()
            if why_unusable(error) is not None or self._current_url() != self._used_url:
                await self._abandon()
            raise RedisUnavailable(f"Redis at {self.name}: {_text(error)}") from error
        _raise_if_cancelled()
        return answer

    async def pipeline(
        self,
        commands: Sequence[tuple[Any, ...]],
        seconds: float = CALL_SECONDS,
        *,
        raise_on_error: bool = True,
    ) -> list[Any]:
        """Executes commands in order, not as a transaction, and returns their replies. Raises
        RedisUnavailable if any command fails. If `raise_on_error` is false, the reply to a failed
        command is an exception. Otherwise all keys must belong to one slot.
        """

        async def use(client: Client) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = await pipeline.execute(raise_on_error=raise_on_error)
            return answers

        return await self.call(use, seconds)

    async def require_usable(self) -> None:
        """Raises SettingError if the URL, the password or the certificate is wrong. An unreachable
        server is only logged, because it may become reachable later.
        """
        try:
            await self.call(lambda client: client.ping(), FIRST_CALL_SECONDS)
        except RedisUnavailable as error:
            if (complaint := why_unusable(error)) is not None:
                raise SettingError(f"--redis-url {self.name}: {complaint}") from error
            logger.warning("%s; the service works without Redis until Redis can be reached", error)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _current_url(self) -> str:
        """The text of the URL's file, or the last known URL if the file cannot be read now."""
        if isinstance(self._url, FileText):
            with suppress(OSError, UnicodeDecodeError):
                return FileText.read(self._url.file)
        return self._used_url

    async def _abandon(self) -> None:
        """Closes the client, whose password, certificates or address may have been replaced. The
        next call connects with the current ones.
        """
        with suppress(Exception):
            await self.close()

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> Client:
        self._used_url = self._current_url()
        single: Redis = Redis.from_url(self._used_url, **self._options)
        try:
            if not await _is_cluster(single):
                return single
        except BaseException:
            await single.aclose()
            raise
        await single.aclose()
        return RedisCluster.from_url(self._used_url, require_full_coverage=False, **self._options)


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


def _raise_if_cancelled() -> None:
    """Raises CancelledError if the task is cancelled, because redis-py may hide a cancellation."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _text(error: BaseException) -> str:
    """The text of an error in one line, without the command with which pipeline errors begin."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error).rpartition("caused error: ")[2] or repr(error)
