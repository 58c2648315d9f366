"""Prometheus metrics of the index of cached prefixes."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common import names
from services.gateway.adapters.directory.counts import ReaderCounts
from services.gateway.core.directory_state import DirectoryState
from services.gateway.core.prefix_index import PrefixIndex


class IndexCollector(Collector):
    """The index's states, one of which is 1, and its reader's counts, read at each scrape."""

    def __init__(self, index: PrefixIndex, counts: ReaderCounts) -> None:
        self._index = index
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """One family for each metric."""
        index, counts = self._index, self._counts
        state = GaugeMetricFamily(
            names.METRIC_INDEX_STATE,
            "How far the index can be relied on: the state that it is in is 1.",
            labels=("state",),
        )
        for name in DirectoryState:
            state.add_metric([name.value], index.state is name)
        yield state
        nodes = GaugeMetricFamily(
            names.METRIC_INDEX_NODE_STATE, "The same of each node.", labels=("node", "state")
        )
        for view in index.views:
            for name in DirectoryState:
                nodes.add_metric([view.node, name.value], index.node_state(view.node) is name)
        yield nodes
        yield GaugeMetricFamily(
            names.METRIC_INDEX_KEYS, "Blocks in the index.", value=index.num_keys
        )
        for metric, text, value in (
            (names.METRIC_INDEX_ENTRIES, "Entries of the log that were applied.", counts.entries),
            (names.METRIC_INDEX_DAMAGED, "Values that could not be read.", counts.damaged),
            (names.METRIC_INDEX_GAPS, "Times that entries were missing.", counts.gaps),
            (names.METRIC_INDEX_DRIFTS, "Times that a digest differed.", counts.drifts),
            (names.METRIC_INDEX_LOADS, "Snapshots that were loaded.", counts.loads),
            (names.METRIC_INDEX_FAILURES, "Calls or streams that failed.", counts.failures),
        ):
            yield CounterMetricFamily(metric, text, value=value)
