from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The current occupancy, and counts of the prefix cache since the pool was opened.
    `num_query_tokens` is the number of tokens that admissions looked up. `num_hit_tokens` is the
    number of these tokens that were hits. Requests that resume after a preemption are not counted.
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
