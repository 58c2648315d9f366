"""Log lines about dropped spans: one when an outage begins, and one when it is over."""

import logging
from collections import Counter
from enum import Enum

logger = logging.getLogger(__name__)

TOO_FAST = "they end faster than the collector takes them"


class DropReason(Enum):
    """Why a span was not sent."""

    QUEUE_FULL = "queue_full"
    """Spans ended faster than the collector took them."""
    NOT_TAKEN = "not_taken"
    """The collector refused them, or has not been there, or not answered, for a minute."""
    SHUTDOWN = "shutdown"
    """The service ended before the collector had taken them."""


class SpanOutage:
    """Compares how many spans were dropped before and after each export. Of an outage, however many
    exports it spans, the log has the cause at its first drop, and the number of drops at its end.
    """

    def __init__(self) -> None:
        self._num_dropped: Counter[DropReason] = Counter()
        """Drops as of the last export."""
        self._before: Counter[DropReason] | None = None
        """Drops as of the last export before the outage; None if there is no outage."""

    def exported(
        self, num_dropped: Counter[DropReason], failure: str | None, *, is_caught_up: bool
    ) -> None:
        """To be called after each export: with all drops so far, why this batch was not taken, and
        whether it was and less than a batch waits. An outage is over when that is so, and nothing
        was dropped since the batch before.
        """
        before, self._num_dropped = self._num_dropped, num_dropped.copy()
        if self._num_dropped != before:
            if self._before is None:
                self._before = before
                logger.warning("spans are dropped: %s", failure or TOO_FAST)
        elif self._before is not None and is_caught_up:
            logger.warning("the collector takes spans again: %s", self._counts())
            self._before = None

    def stopped(self, num_dropped: Counter[DropReason]) -> None:
        """The service ends: says what was dropped since the outage began, or, where the collector
        has not answered the export that goes on, since that one began.
        """
        if self._before is None:
            self._before = self._num_dropped
        self._num_dropped = num_dropped.copy()
        if self._num_dropped != self._before:
            logger.warning("the service ends while spans are dropped: %s", self._counts())

    def _counts(self) -> str:
        """What was dropped in it, such as "12 were dropped (10 queue_full, 2 not_taken)"."""
        counts = self._num_dropped - (self._before or Counter())
        parts = ", ".join(
            f"{counts[reason]} {reason.value}" for reason in DropReason if reason in counts
        )
        return f"{counts.total()} were dropped ({parts})"
