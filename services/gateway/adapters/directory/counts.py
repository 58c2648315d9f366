"""Counts of entries applied to the index of cached prefixes, and of faults found in them."""

from dataclasses import dataclass


@dataclass(slots=True)
class ReaderCounts:
    """Counts since the start."""

    entries: int = 0
    """Entries of the log, or messages of pools, that were applied."""
    damaged: int = 0
    """Entries, records, leases and snapshots that could not be decoded, and were skipped."""
    gaps: int = 0
    """Number of times that entries of a node were missing."""
    drifts: int = 0
    """Number of times that the digest of a node differed from its view's."""
    loads: int = 0
    """Snapshots that were loaded."""
    failures: int = 0
    """Failed calls of Redis, or failed streams of pools."""
