"""API keys in files, which are read again after each change."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from services.common.keys.api_keys import DamagedRecord
from services.common.keys.book import KeyBook
from services.common.keys.book_file import read_book, version_of
from services.common.process.settings import FileItems, SettingError
from services.gateway.options.tenants.keys.store import KnownKey

_LOOK_SECONDS = 1.0

logger = logging.getLogger(__name__)


class FileKeys:
    """A KeyStore that caches a file's keys, which stay valid if the file is damaged or removed."""

    def __init__(self, path: Path, *, share_cache: bool) -> None:
        self._path = path
        self._share_cache = share_cache
        self._version: tuple[int, int, int] | None = None
        self._keys: dict[str, KnownKey] = {}
        self._reading = asyncio.Lock()

    def known(self, key_id: str) -> KnownKey | None:
        return self._keys.get(key_id)

    async def find(self, key_id: str) -> KnownKey | None:
        """Finds a key. If the file has changed, reads it again first."""
        await self._follow()
        return self._keys.get(key_id)

    async def require_usable(self) -> None:
        try:
            await self._read()
        except (OSError, DamagedRecord) as error:
            raise SettingError(f"--api-key-file {self._path}: {_why(error)}") from error

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self._follow()

    async def _follow(self) -> None:
        async with self._reading:
            if (version := version_of(self._path)) == self._version:
                return
            try:
                await self._read()
            except (OSError, DamagedRecord) as error:
                self._version = version
                logger.error(
                    "--api-key-file %s: %s; the previous keys stay in use",
                    self._path,
                    _why(error),
                )
            else:
                logger.info("%d API keys are in use", len(self._keys))

    async def _read(self) -> None:
        version = version_of(self._path)
        book: KeyBook = await asyncio.to_thread(read_book, self._path)
        self._keys = {
            key.key_id: KnownKey.of(key, book.tenant_of(key), share_cache=self._share_cache)
            for key in book.keys.values()
        }
        self._version = version


def _why(error: OSError | DamagedRecord) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


async def follow_plain_keys(keys: FileItems, set_plain: Callable[[Sequence[str]], None]) -> None:
    """Calls `set_plain` whenever the keys in the file of --api-keys have changed."""
    version = None
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if (found := version_of(keys.file)) == version:
            continue
        version = found
        try:
            read = FileItems.read(keys.file)
        except (OSError, UnicodeDecodeError) as error:
            logger.error(
                "the file of --api-keys, %s: %s; the previous keys stay in use", keys.file, error
            )
            continue
        if read != keys:
            keys = read
            set_plain(keys)
            logger.info("%d API keys of --api-keys are in use", len(keys))
