"""Counts what the doors cut, and logs it in one line every few seconds at most."""

import asyncio
import logging
from collections import Counter

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0


class Cuts:
    """Connections and messages that were ended or refused before they were requests."""

    def __init__(self, protocol: str) -> None:
        self.totals: Counter[str] = Counter()
        self._protocol = protocol
        self._untold: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, reason: str) -> None:
        """One more was cut. The first of many is logged at once."""
        self.totals[reason] += 1
        self._untold[reason] += 1
        if self._timer is None:
            self._tell()

    def _tell(self) -> None:
        self._timer = None
        if not self._untold:
            return
        counts = ", ".join(f"{reason} ({count})" for reason, count in self._untold.items())
        logger.warning("%s: ended or refused: %s", self._protocol, counts)
        self._untold.clear()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SECONDS_BETWEEN_LINES, self._tell)
