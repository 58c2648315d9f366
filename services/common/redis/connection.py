"""Calls Redis, a single server or a cluster, depending on the URL.

Calls fail within a fraction of a second, since no request may wait for Redis. redis-py's default is
ten retries of five seconds each. Here a call is never retried, and both the whole call and each
socket operation have a time limit. Commands are limited to Redis 6.2 and RESP2.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from services.common.errors import Unavailable
from services.common.process.settings import FileText, SettingError
from services.common.redis.url import NEEDS_REDIS, missing_file, without_secrets

CALL_SECONDS = 0.5
FIRST_CALL_SECONDS = 1.0
_LAST_TURNS = 3

T = TypeVar("T")
Client = Any  # Redis or RedisCluster. Both have the methods that are used.

logger = logging.getLogger(__name__)


class RedisUnavailable(Unavailable):
    """Redis failed or did not reply in time. The command may or may not have been executed."""

    reason = "REDIS_UNAVAILABLE"

    def __init__(self, message: str, complaint: str | None = None) -> None:
        super().__init__(message)
        self.complaint = complaint
        """What is wrong with URL, password or certificate. None if a retry may succeed."""


class RedisConnection:
    """A connection to Redis, which is opened when a call needs it. Calls may overlap.

    After a call that failed, the URL is read again if it came from a file, and so are the
    certificates that the URL names if they were the reason.
    """

    def __init__(self, url: str, *, blocking: bool = False) -> None:
        """`blocking` permits commands that block at the server, by removing the time limit of
        socket operations. Raises SettingError if the package `redis` or a file that the URL names
        is missing.
        """
        try:
            from services.common.redis.client import connect, why_unusable  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise SettingError(NEEDS_REDIS) from error
        self._connect = partial(connect, blocking=blocking)
        self._why_unusable = why_unusable
        self.name = without_secrets(url)
        if (complaint := missing_file(url)) is not None:
            raise SettingError(f"--redis-url {self.name}: {complaint}")
        self._url = url
        self._used_url = url
        self._client: Client | None = None
        self._connecting = asyncio.Lock()

    async def call(self, use: Callable[[Client], Awaitable[T]], seconds: float = CALL_SECONDS) -> T:
        """Returns the result of `use(client)`. Raises RedisUnavailable on failure or timeout."""
        try:
            async with _timeout(seconds):
                answer = await use(await self._connected())
        # Every error is caught, because redis-py does not document all errors that it can raise
        # while a cluster changes. Every error means that the call has failed.
        except Exception as error:
            _raise_if_cancelled()
            complaint = self._why_unusable(error)
            if complaint is not None or self._current_url() != self._used_url:
                await self._abandon()
            raise RedisUnavailable(f"Redis at {self.name}: {_text(error)}", complaint) from error
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
            if error.complaint is not None:
                raise SettingError(f"--redis-url {self.name}: {error.complaint}") from error
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
                self._used_url = self._current_url()
                self._client = await self._connect(self._used_url)
            return self._client


@asynccontextmanager
async def _timeout(seconds: float) -> AsyncIterator[None]:
    """Like asyncio.timeout, but runs the event loop _LAST_TURNS more times after the time is over.
    So a reply that arrived while the event loop was busy is not late.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer: asyncio.Handle = loop.call_later(seconds, lambda: expire(_LAST_TURNS))

        def expire(num_turns: int) -> None:
            nonlocal timer
            if num_turns:
                timer = loop.call_soon(expire, num_turns - 1)
            else:
                limit.reschedule(loop.time())

        try:
            yield
        finally:
            timer.cancel()


def _raise_if_cancelled() -> None:
    """Raises CancelledError if the task is cancelled, because redis-py may hide a cancellation."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _text(error: BaseException) -> str:
    """The text of an error in one line, without the command with which pipeline errors begin."""
    if type(error).__name__ == TimeoutError.__name__:  # redis-py's class has the same name
        return "no answer in time"
    return str(error).rpartition("caused error: ")[2] or repr(error)
