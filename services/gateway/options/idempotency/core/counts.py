"""Counts of requests with an idempotency key, of their answers, and of the answers' logs, from
which other gateways can read the answers.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class KeyCounts:
    """Counts of requests with a key and of their answers, since the start of the gateway."""

    begun: int = 0
    """The number of requests for which this gateway started an answer."""
    attached: int = 0
    """The number of requests that found an answer at this gateway, complete or in progress."""
    followed: int = 0
    """The number of requests that found an answer of another gateway, complete or in progress."""
    resumed: int = 0
    """The number of stopped answers that this gateway resumed. An answer stops when the gateway
    that generates it dies, or when no client reads it for too long.
    """
    refused: int = 0
    """The number of requests that were refused because an earlier request had the same key and
    different content.
    """
    suspended: int = 0
    """The number of answers that were stopped because no client read them."""
    evicted: int = 0
    """The number of answers that were removed early to free memory."""


@dataclass(slots=True)
class SharingCounts:
    """Counts of the logs of shared answers, since the start of the gateway."""

    entries: int = 0
    """The number of entries that were appended to logs."""
    alone: int = 0
    """The number of times that this gateway generated an answer without its log, because the
    journal (the store of all logs) was unavailable or the log was unusable.
    """
    fenced: int = 0
    """The number of answers that another gateway took over while this gateway generated them."""
    lost: int = 0
    """The number of logs that had disappeared from the journal, and were written again."""
    damaged: int = 0
    """The number of times that a log could not be decoded."""
    failures: int = 0
    """The number of failed calls to the journal."""
