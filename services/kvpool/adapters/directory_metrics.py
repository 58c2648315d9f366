"""Prometheus metrics of writes to the directory in Redis."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry import names
from services.common.telemetry.metric_specs import single

if TYPE_CHECKING:
    from services.kvpool.adapters.redis_directory import RedisDirectory


class DirectoryCollector(Collector):
    """Exports the writers' counts, summed over all pools and read at each scrape."""

    def __init__(self, directory: "RedisDirectory") -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        """Yields one family for each metric."""
        directory, counts = self._directory, self._directory.counts
        for name, value in (
            (names.METRIC_DIRECTORY_ENTRIES, counts.entries),
            (names.METRIC_DIRECTORY_KEYS, counts.keys),
            (names.METRIC_DIRECTORY_SNAPSHOTS, counts.snapshots),
            (names.METRIC_DIRECTORY_LIVES, counts.num_epochs),
            (names.METRIC_DIRECTORY_FAILURES, counts.failures),
            (names.METRIC_DIRECTORY_DROPPED, directory.num_dropped),
            (names.METRIC_DIRECTORY_CONNECTED, len(counts.nodes_connected)),
            (names.METRIC_DIRECTORY_UNWRITTEN, directory.num_unwritten),
        ):
            yield single(name, value)
