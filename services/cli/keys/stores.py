"""The stores in which `stepwell keys` reads and writes records: a file or Redis."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from services.cli.errors import CommandError
from services.common.keys import book_redis
from services.common.keys.api_keys import DamagedRecord
from services.common.keys.book import KeyBook
from services.common.keys.book_file import change_book, read_book
from services.common.process.settings import SettingError
from services.common.redis.connection import RedisConnection, RedisUnavailable
from services.common.redis.url import is_redis_url

T = TypeVar("T")


class Store(Protocol):
    """A store of the records of keys and tenants. Failed reads and writes raise CommandError."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def read(self) -> KeyBook:
        """Returns all records."""
        ...

    def change(self, change: Callable[[KeyBook], KeyBook]) -> None:
        """Replaces the records that differ in the result of `change`, which may be called again if
        another process changes records at the same time.
        """
        ...


class FileStore:
    """A store in a file. The first write creates the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self) -> KeyBook:
        try:
            return read_book(self._path)
        except FileNotFoundError:
            return KeyBook()
        except (OSError, DamagedRecord) as error:
            raise self._failure(error) from error

    def change(self, change: Callable[[KeyBook], KeyBook]) -> None:
        try:
            change_book(self._path, change)
        except (OSError, DamagedRecord) as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError | DamagedRecord) -> CommandError:
        why = error.strerror if isinstance(error, OSError) else None
        return CommandError(f"--file {self._path}: {why or error}")


class RedisStore:
    """A store in a Redis server or cluster."""

    def __init__(self, url: str) -> None:
        if (complaint := is_redis_url(url)) is not None:
            raise CommandError(f"--redis-url {complaint}", exit_status=2)
        try:
            self._connection = RedisConnection(url)
        except SettingError as error:
            raise CommandError(str(error)) from error
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._connection.close())
        self._runner.close()

    def read(self) -> KeyBook:
        return self._do(book_redis.read_book)

    def change(self, change: Callable[[KeyBook], KeyBook]) -> None:
        self._do(lambda redis: book_redis.change_book(redis, change, lambda: secrets.token_hex(8)))

    def _do(self, use: Callable[[Any], Awaitable[T]]) -> T:
        async def run() -> T:
            return await use(self._connection)

        try:
            return self._runner.run(run())
        except RedisUnavailable as error:
            why = error.complaint or "no server answers at this address"
            raise CommandError(f"--redis-url {self._connection.name}: {why}") from error
        except DamagedRecord as error:
            raise CommandError(f"--redis-url {self._connection.name}: {error}") from error
