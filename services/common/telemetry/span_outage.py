"""Logs dropped spans, with one line when an outage begins and one line when it ends."""

import logging
from collections import Counter
from enum import Enum

logger = logging.getLogger(__name__)

TOO_FAST = "the service produces spans faster than the collector accepts them"


class DropReason(Enum):
    """Why a span was not sent."""

    QUEUE_FULL = "queue_full"
    """Spans ended faster than the collector accepted them."""
    NOT_TAKEN = "not_taken"
    """The collector rejected the spans, or was unreachable or silent for a minute."""
    SHUTDOWN = "shutdown"
    """The service ended before the collector had accepted the spans."""


class SpanOutage:
    """Detects outages from the numbers of dropped spans before and after each export. An outage may
    last for many exports. The cause is logged when the outage begins, and the number of dropped
    spans when it ends.
    """

    def __init__(self) -> None:
        self._num_dropped: Counter[DropReason] = Counter()
        """The counts of dropped spans at the last export."""
        self._before: Counter[DropReason] | None = None
        """The counts at the last export before the outage. None if there is no outage."""

    def exported(
        self, num_dropped: Counter[DropReason], failure: str | None, *, is_caught_up: bool
    ) -> None:
        """Must be called after each export of a batch. `num_dropped` counts all spans dropped so
        far. `failure` explains why this export failed. `is_caught_up` means that the batch was
        accepted and less than one batch is queued. An outage ends when `is_caught_up` is set and no
        span was dropped since the previous export.
        """
        before, self._num_dropped = self._num_dropped, num_dropped.copy()
        if self._num_dropped != before:
            if self._before is None:
                self._before = before
                logger.warning("spans are dropped: %s", failure or TOO_FAST)
        elif self._before is not None and is_caught_up:
            logger.warning("the collector accepts spans again: %s", self._counts())
            self._before = None

    def stopped(self, num_dropped: Counter[DropReason]) -> None:
        """Must be called when the service ends. Logs the number of spans dropped since the outage
        began. Without an outage, logs the spans dropped since the last completed export, if any.
        """
        if self._before is None:
            self._before = self._num_dropped
        self._num_dropped = num_dropped.copy()
        if self._num_dropped != self._before:
            logger.warning(
                "the service stops while the collector does not accept its spans: %s",
                self._counts(),
            )

    def _counts(self) -> str:
        """The outage's dropped spans, such as "2 spans were dropped (2 not_taken)"."""
        counts = self._num_dropped - (self._before or Counter())
        parts = ", ".join(
            f"{counts[reason]} {reason.value}" for reason in DropReason if reason in counts
        )
        return f"{counts.total()} spans were dropped ({parts})"
