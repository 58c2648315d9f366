"""Prometheus metrics of what is written to the directory in Redis."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common import names

if TYPE_CHECKING:
    from services.kvpool.adapters.redis_directory import RedisDirectory


class DirectoryCollector(Collector):
    """The writer's counts, of all pools together, read at each scrape."""

    def __init__(self, directory: "RedisDirectory") -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        """One family for each metric."""
        directory, counts = self._directory, self._directory.counts
        for name, text, value in (
            (names.METRIC_DIRECTORY_ENTRIES, "Entries written to the log.", counts.entries),
            (names.METRIC_DIRECTORY_KEYS, "Keys in those entries.", counts.keys),
            (names.METRIC_DIRECTORY_SNAPSHOTS, "Snapshots written.", counts.snapshots),
            (names.METRIC_DIRECTORY_LIVES, "Lives of nodes begun.", counts.lives),
            (
                names.METRIC_DIRECTORY_FAILURES,
                "Calls of Redis that failed; each ends a life.",
                counts.failures,
            ),
            (
                names.METRIC_DIRECTORY_DROPPED,
                "Changes forgotten since too many were unwritten; a snapshot replaces them.",
                directory.num_dropped,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)
        for name, text, value in (
            (
                names.METRIC_DIRECTORY_CONNECTED,
                "Pools whose life Redis holds.",
                len(counts.nodes_connected),
            ),
            (names.METRIC_DIRECTORY_UNWRITTEN, "Changes not written yet.", directory.num_unwritten),
        ):
            yield GaugeMetricFamily(name, text, value=value)
