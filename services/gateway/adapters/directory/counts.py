"""Counts of entries applied to the index of cached prefixes, and of faults found in them."""

from dataclasses import dataclass


@dataclass(slots=True)
class ReaderCounts:
    """Counts since the gateway's start."""

    entries: int = 0
    """Number of applied entries of the log, or messages of pools."""
    damaged: int = 0
    """Number of entries, records, leases and snapshots that were skipped because they could not be
    decoded.
    """
    gaps: int = 0
    """Number of times that entries of a node were missing."""
    drifts: int = 0
    """Number of times that the digest of a node differed from the digest of its view."""
    loads: int = 0
    failures: int = 0
    """Number of failed calls of Redis, or failed streams of pools."""
