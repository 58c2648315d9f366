"""Prometheus metrics of the pools, read from their counts at each scrape.

The hot path writes no metric. vLLM's names are used where the meaning is vLLM's; metrics of a
replica as a whole are the scheduler's.
"""

from collections.abc import Callable, Iterator
from typing import Generic

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from services.common import names
from services.kvpool.core.pool_host import Answer, PoolHost
from services.kvpool.core.stats import PoolStats

LABELS = ("engine",)

Read = Callable[[PoolStats], float]
Count = Callable[[PoolStats], int]

_GAUGES: tuple[tuple[str, str, Read], ...] = (
    (
        names.METRIC_POOL_USAGE,
        "Share of the blocks that are held, 1 is all of them.",
        lambda stats: 1 - stats.num_free_blocks / stats.num_usable_blocks,
    ),
    (
        names.METRIC_POOL_CACHED_HASHES,
        "Hashes that can be found.",
        lambda stats: stats.num_cached_hashes,
    ),
)

_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    (
        names.METRIC_PREFIX_CACHE_QUERIES,
        "Prompt tokens looked up by admissions, those after a preemption left out.",
        lambda stats: stats.num_query_tokens,
    ),
    (
        names.METRIC_PREFIX_CACHE_HITS,
        "Prompt tokens found by admissions, those after a preemption left out.",
        lambda stats: stats.num_hit_tokens,
    ),
    (
        names.METRIC_POOL_EVICTIONS,
        "Cached blocks that were reused for something else.",
        lambda stats: stats.num_evictions,
    ),
    (
        names.METRIC_POOL_REUSES,
        "Free cached blocks that an admission found.",
        lambda stats: stats.num_reuses,
    ),
    (
        names.METRIC_POOL_RESETS,
        "Times that every hash was forgotten on demand.",
        lambda stats: stats.num_resets,
    ),
    (
        names.METRIC_POOL_TRANSACTIONS,
        "Transactions applied.",
        lambda stats: stats.num_transactions,
    ),
)

# A count and a sum each, so that rate(sum) / rate(count) is the mean of any stretch of time.
_SUMMARIES: tuple[tuple[str, str, Count, Read], ...] = (
    (
        names.METRIC_POOL_BLOCK_LIFETIME,
        "Transactions from a block's publication to its eviction.",
        lambda stats: stats.num_evictions,
        lambda stats: stats.evicted_lifetime_transactions,
    ),
    (
        names.METRIC_POOL_BLOCK_IDLE_BEFORE_EVICT,
        "Transactions from a block's last release to its eviction.",
        lambda stats: stats.num_evictions,
        lambda stats: stats.evicted_idle_transactions,
    ),
    (
        names.METRIC_POOL_BLOCK_REUSE_GAP,
        "Transactions from a block's last release until an admission found it.",
        lambda stats: stats.num_reuses,
        lambda stats: stats.reuse_gap_transactions,
    ),
)


class PoolCollector(Collector, Generic[Answer]):
    """The counts of every pool, by its name as `engine`. Counters restart when it is reopened."""

    def __init__(self, host: PoolHost[Answer]) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """One family for each metric."""
        pools = [(hosted, hosted.pool.stats()) for hosted in self._host.pools()]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for hosted, stats in pools:
                gauge.add_metric([hosted.pool_id], read(stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for hosted, stats in pools:
                counter.add_metric([hosted.pool_id], read(stats))
            yield counter
        for name, text, read_count, read_sum in _SUMMARIES:
            summary = SummaryMetricFamily(name, text, labels=LABELS)
            for hosted, stats in pools:
                summary.add_metric([hosted.pool_id], read_count(stats), read_sum(stats))
            yield summary
