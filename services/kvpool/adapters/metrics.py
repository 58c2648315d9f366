"""Prometheus metrics of the pools, read from their counts at each scrape.

The hot path writes no metric. vLLM's names are used where the meaning is vLLM's; metrics of a
replica as a whole are the scheduler's.
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic

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

# A summary has a count and a sum, so that rate(sum) / rate(count) is the mean of any stretch of
# time.
_FAMILIES: tuple[tuple[Callable[..., Any], str, str, tuple[Read, ...]], ...] = (
    (
        GaugeMetricFamily,
        names.METRIC_POOL_USAGE,
        "Share of the blocks that are held, 1 is all of them.",
        (lambda stats: 1 - stats.num_free_blocks / stats.num_usable_blocks,),
    ),
    (
        GaugeMetricFamily,
        names.METRIC_POOL_CACHED_HASHES,
        "Hashes that can be found.",
        (lambda stats: stats.num_cached_hashes,),
    ),
    (
        CounterMetricFamily,
        names.METRIC_PREFIX_CACHE_QUERIES,
        "Prompt tokens looked up by admissions, those after a preemption left out.",
        (lambda stats: stats.num_query_tokens,),
    ),
    (
        CounterMetricFamily,
        names.METRIC_PREFIX_CACHE_HITS,
        "Prompt tokens found by admissions, those after a preemption left out.",
        (lambda stats: stats.num_hit_tokens,),
    ),
    (
        CounterMetricFamily,
        names.METRIC_POOL_EVICTIONS,
        "Cached blocks that were reused for something else.",
        (lambda stats: stats.num_evictions,),
    ),
    (
        CounterMetricFamily,
        names.METRIC_POOL_REUSES,
        "Free cached blocks that an admission found.",
        (lambda stats: stats.num_reuses,),
    ),
    (
        CounterMetricFamily,
        names.METRIC_POOL_RESETS,
        "Times that every hash was forgotten on demand.",
        (lambda stats: stats.num_resets,),
    ),
    (
        CounterMetricFamily,
        names.METRIC_POOL_TRANSACTIONS,
        "Transactions applied.",
        (lambda stats: stats.num_transactions,),
    ),
    (
        SummaryMetricFamily,
        names.METRIC_POOL_BLOCK_LIFETIME,
        "Transactions from a block's publication to its eviction.",
        (lambda stats: stats.num_evictions, lambda stats: stats.evicted_lifetime_transactions),
    ),
    (
        SummaryMetricFamily,
        names.METRIC_POOL_BLOCK_IDLE_BEFORE_EVICT,
        "Transactions from a block's last release to its eviction.",
        (lambda stats: stats.num_evictions, lambda stats: stats.evicted_idle_transactions),
    ),
    (
        SummaryMetricFamily,
        names.METRIC_POOL_BLOCK_REUSE_GAP,
        "Transactions from a block's last release until an admission found it.",
        (lambda stats: stats.num_reuses, lambda stats: stats.reuse_gap_transactions),
    ),
)


class PoolCollector(Collector, Generic[Answer]):
    """The counts of every pool, by its name as `engine`. Counters restart when it is reopened."""

    def __init__(self, host: PoolHost[Answer]) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """One family for each metric."""
        pools = [(hosted.pool_id, hosted.pool.stats()) for hosted in self._host.pools()]
        for create, name, text, reads in _FAMILIES:
            family = create(name, text, labels=LABELS)
            for pool_id, stats in pools:
                family.add_metric([pool_id], *(read(stats) for read in reads))
            yield family
