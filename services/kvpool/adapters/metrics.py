"""Prometheus metrics of the pools and of writes to Redis, read from counts at each scrape. The hot
path updates no metric. A metric has vLLM's name if it has the meaning of vLLM's metric.
"""

from collections.abc import Callable, Iterator
from typing import Generic

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import by_label, replica, single, summary_family, vllm
from services.common.telemetry.metric_specs.spec import MetricSpec
from services.kvpool.adapters.redis_directory import RedisDirectory
from services.kvpool.core.kv_pool import PoolStats
from services.kvpool.core.pool_host import Answer, PoolHost

Read = Callable[[PoolStats], float]

_VALUES: dict[MetricSpec, Read] = {
    replica.POOL_USAGE: lambda stats: 1 - stats.num_free_blocks / stats.num_usable_blocks,
    replica.POOL_CACHED_HASHES: lambda stats: stats.num_cached_hashes,
    vllm.PREFIX_CACHE_QUERIES: lambda stats: stats.num_query_tokens,
    vllm.PREFIX_CACHE_HITS: lambda stats: stats.num_hit_tokens,
    replica.POOL_EVICTIONS: lambda stats: stats.num_evictions,
    replica.POOL_REUSES: lambda stats: stats.num_reuses,
    replica.POOL_RESETS: lambda stats: stats.num_resets,
    replica.POOL_TRANSACTIONS: lambda stats: stats.num_transactions,
}
_COUNTS_AND_SUMS: dict[MetricSpec, tuple[Read, Read]] = {
    replica.POOL_BLOCK_LIFETIME: (
        lambda stats: stats.num_evictions,
        lambda stats: stats.evicted_lifetime_transactions,
    ),
    replica.POOL_BLOCK_IDLE_BEFORE_EVICT: (
        lambda stats: stats.num_evictions,
        lambda stats: stats.evicted_idle_transactions,
    ),
    replica.POOL_BLOCK_REUSE_GAP: (
        lambda stats: stats.num_reuses,
        lambda stats: stats.reuse_gap_transactions,
    ),
}


class PoolCollector(Collector, Generic[Answer]):
    """Exports the counts of every pool since it was opened, labelled `engine` with its name."""

    def __init__(self, host: PoolHost[Answer]) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        pools = [(hosted.pool_id, hosted.pool.stats()) for hosted in self._host.pools()]
        for spec, read in _VALUES.items():
            yield by_label(spec, {pool_id: read(stats) for pool_id, stats in pools})
        for spec, (read_count, read_sum) in _COUNTS_AND_SUMS.items():
            summary = summary_family(spec)
            for pool_id, stats in pools:
                summary.add_metric([pool_id], int(read_count(stats)), read_sum(stats))
            yield summary


class DirectoryCollector(Collector):
    """Exports the counts of writes to the directory in Redis, summed over all pools."""

    def __init__(self, directory: RedisDirectory) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        directory, counts = self._directory, self._directory.counts
        for name, value in (
            (replica.DIRECTORY_ENTRIES, counts.entries),
            (replica.DIRECTORY_KEYS, counts.keys),
            (replica.DIRECTORY_SNAPSHOTS, counts.snapshots),
            (replica.DIRECTORY_LIVES, counts.num_epochs),
            (replica.DIRECTORY_FAILURES, counts.failures),
            (replica.DIRECTORY_DROPPED, directory.num_dropped),
            (replica.DIRECTORY_CONNECTED, len(counts.nodes_connected)),
            (replica.DIRECTORY_UNWRITTEN, directory.num_unwritten),
        ):
            yield single(name, value)
