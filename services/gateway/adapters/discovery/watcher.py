"""Polls one source of scheduler addresses."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from services.common.errors import Unavailable

logger = logging.getLogger(__name__)

Look = Callable[[], Awaitable[Iterable[str]]]
SetAddresses = Callable[[str, Iterable[str]], None]


class Watcher:
    """Forwards the addresses of a source. While the source fails, its last addresses stay in
    use.
    """

    def __init__(
        self, source: str, look: Look, set_addresses: SetAddresses, every_seconds: float
    ) -> None:
        """`look` returns the addresses, or raises Unavailable within a bounded time."""
        self.source = source
        self.is_up = False
        self.num_addresses = 0
        self.num_failures = 0
        self._look = look
        self._set_addresses = set_addresses
        self._every_seconds = every_seconds

    async def run(self) -> None:
        while True:
            try:
                addresses = sorted(await self._look())
            except Unavailable as error:
                self._failed(error)
            else:
                self._found(addresses)
            await asyncio.sleep(self._every_seconds)

    def _failed(self, error: Unavailable) -> None:
        if self.is_up or not self.num_failures:
            logger.warning(
                "schedulers are not found by %s, the known ones are kept: %s", self.source, error
            )
        self.is_up = False
        self.num_failures += 1

    def _found(self, addresses: list[str]) -> None:
        if not self.is_up and self.num_failures:
            logger.info("schedulers are found by %s again", self.source)
        self.is_up = True
        self.num_addresses = len(addresses)
        self._set_addresses(self.source, addresses)
