"""Counts of the entries read into the index of cached prefixes, and of faults in them."""

from dataclasses import dataclass


@dataclass(slots=True)
class ReaderCounts:
    """Counts since the start."""

    entries: int = 0
    """Entries of the log, or messages of pools, that were applied."""
    damaged: int = 0
    """Entries, records, leases and snapshots that could not be read, and were passed over."""
    gaps: int = 0
    """Times that entries of a node were missing."""
    drifts: int = 0
    """Times that the digest of a node differed."""
    loads: int = 0
    """Snapshots that were loaded."""
    failures: int = 0
    """Calls of Redis, or streams of pools, that failed."""
