"""Counts of requests with an idempotency key, by outcome."""

from dataclasses import dataclass


@dataclass(slots=True)
class KeyCounts:
    """Counts since the start."""

    begun: int = 0
    """Requests for which this gateway started an answer."""
    attached: int = 0
    """Requests that found an answer at this gateway, complete or in progress."""
    followed: int = 0
    """Requests that found an answer from another gateway, complete or in progress."""
    resumed: int = 0
    """Stopped answers that were resumed here, after their gateway or their client had left."""
    refused: int = 0
    """Requests refused because their key belongs to a different request."""
    suspended: int = 0
    """Answers stopped because no client read them."""
    evicted: int = 0
    """Answers forgotten early to free memory."""


@dataclass(slots=True)
class SharingCounts:
    """Counts since the start."""

    entries: int = 0
    """Entries that were appended to logs."""
    alone: int = 0
    """Answers that are not shared with other gateways, because Redis or the answers' log entries
    were unavailable.
    """
    fenced: int = 0
    """Answers taken over by another gateway while this one was generating them."""
    lost: int = 0
    """Logs that had disappeared, and were written again."""
    damaged: int = 0
    """Logs that could not be decoded, and were removed."""
    failures: int = 0
    """Failed calls of the journal."""
