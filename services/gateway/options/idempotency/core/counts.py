"""Counts of requests with an idempotency key, of their answers, and of the answers' logs, from
which other gateways can read the answers.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class KeyCounts:
    """Counts of requests with a key and of their answers, since the start of the gateway."""

    begun: int = 0
    attached: int = 0
    followed: int = 0
    resumed: int = 0
    """The number of stopped answers that this gateway resumed. An answer stops when the gateway
    that generates it dies, or when no client reads it for too long.
    """
    refused: int = 0
    suspended: int = 0
    evicted: int = 0


@dataclass(slots=True)
class SharingCounts:
    """Counts of the logs of shared answers, since the start of the gateway."""

    entries: int = 0
    alone: int = 0
    """The number of times that this gateway generated an answer without its log, because the
    journal (the store of all logs) was unavailable or the log was unusable.
    """
    fenced: int = 0
    lost: int = 0
    damaged: int = 0
    failures: int = 0
