"""The counts of a pool."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Occupancy now, and what the prefix cache did since the pool was opened.

    Query tokens are those that admissions could have found, hit tokens those they found; requests
    that resume after a preemption count in neither.
    """

    num_usable_blocks: int
    num_free_blocks: int
    num_cached_hashes: int
    num_requests: int
    num_evictions: int
    num_query_tokens: int
    num_hit_tokens: int
    num_transactions: int
    num_resets: int
    evicted_lifetime_transactions: int
    evicted_idle_transactions: int
    num_reuses: int
    reuse_gap_transactions: int
    num_common_prefix_blocks: tuple[int, ...]
