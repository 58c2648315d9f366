"""Prometheus metrics of the index of cached prefixes."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry import names
from services.common.telemetry.metric_specs import single, value_family
from services.gateway.adapters.directory.counts import ReaderCounts
from services.gateway.core.prefix_index.directory_state import DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex


class IndexCollector(Collector):
    """The state of the index and the counts of its reader, read at each scrape. Each state is a
    series. The current state's series is 1, the others are 0.
    """

    def __init__(self, index: PrefixIndex, counts: ReaderCounts) -> None:
        self._index = index
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        index, counts = self._index, self._counts
        state = value_family(names.METRIC_INDEX_STATE)
        for name in DirectoryState:
            state.add_metric([name.value], index.state is name)
        yield state
        nodes = value_family(names.METRIC_INDEX_NODE_STATE)
        for view in index.views:
            for name in DirectoryState:
                nodes.add_metric([view.node, name.value], index.node_state(view.node) is name)
        yield nodes
        for metric, value in (
            (names.METRIC_INDEX_KEYS, index.num_keys),
            (names.METRIC_INDEX_ENTRIES, counts.entries),
            (names.METRIC_INDEX_DAMAGED, counts.damaged),
            (names.METRIC_INDEX_GAPS, counts.gaps),
            (names.METRIC_INDEX_DRIFTS, counts.drifts),
            (names.METRIC_INDEX_LOADS, counts.loads),
            (names.METRIC_INDEX_FAILURES, counts.failures),
        ):
            yield single(metric, value)
