"""Counts what is refused before it is a request, and logs it in one line every few seconds."""

import asyncio
import logging
from collections import Counter

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0


class RefusalLog:
    """Connections and messages that were ended or refused, by reason."""

    def __init__(self, protocol: str) -> None:
        self.totals: Counter[str] = Counter()
        self._protocol = protocol
        self._unlogged: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def count(self, reason: str) -> None:
        """One more. The first of many is logged at once."""
        self.totals[reason] += 1
        self._unlogged[reason] += 1
        if self._timer is None:
            self._log()

    def _log(self) -> None:
        self._timer = None
        if not self._unlogged:
            return
        counts = ", ".join(f"{reason} ({count})" for reason, count in self._unlogged.items())
        logger.warning("%s: ended or refused: %s", self._protocol, counts)
        self._unlogged.clear()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SECONDS_BETWEEN_LINES, self._log)
