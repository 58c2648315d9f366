"""Prometheus metrics of the pools, read from their counts when somebody asks.

The hot path writes no metric. vLLM's names stand where the meaning is vLLM's; those that describe
a replica as a whole are the scheduler's.
"""

from collections.abc import Callable, Iterator
from typing import Generic

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common import names
from services.kvpool.core.pool_host import Answer, PoolHost
from services.kvpool.core.stats import PoolStats

LABELS = ("engine",)

Read = Callable[[PoolStats], float]

_GAUGES: tuple[tuple[str, str, Read], ...] = (
    (
        names.METRIC_POOL_USAGE,
        "Share of the blocks that are held, 1 is all of them.",
        lambda stats: 1 - stats.num_free_blocks / stats.num_usable_blocks,
    ),
)

_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    (
        names.METRIC_PREFIX_CACHE_QUERIES,
        "Prompt tokens looked up by admissions.",
        lambda stats: stats.num_query_tokens,
    ),
    (
        names.METRIC_PREFIX_CACHE_HITS,
        "Prompt tokens found by admissions.",
        lambda stats: stats.num_hit_tokens,
    ),
    (
        names.METRIC_POOL_EVICTIONS,
        "Cached blocks that were reused for something else.",
        lambda stats: stats.num_evictions,
    ),
    (
        names.METRIC_POOL_TRANSACTIONS,
        "Transactions applied.",
        lambda stats: stats.num_transactions,
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
