"""Counts of requests with an idempotency key, by outcome."""

from dataclasses import dataclass


@dataclass(slots=True)
class KeyCounts:
    """Counts since the start."""

    begun: int = 0
    """Requests whose answer was begun here."""
    attached: int = 0
    """Requests that met an answer, whole or in the making, at this gateway."""
    followed: int = 0
    """Requests that met an answer that another gateway makes or made."""
    resumed: int = 0
    """Answers that went on here after they had stopped, with their gateway or their client."""
    refused: int = 0
    """Requests whose key belongs to another request."""
    suspended: int = 0
    """Answers that were not made any further, since no client read them."""
    evicted: int = 0
    """Answers that were forgotten before their time, for want of room."""


@dataclass(slots=True)
class SharingCounts:
    """Counts since the start."""

    entries: int = 0
    """Entries that were written."""
    alone: int = 0
    """Answers that other gateways could not or cannot find: Redis, or the entry, was not there."""
    fenced: int = 0
    """Answers that another gateway took over while this one made them."""
    lost: int = 0
    """Logs that were gone, and were written again."""
    damaged: int = 0
    """Logs that could not be read, and were removed."""
    failures: int = 0
    """Calls that failed."""
