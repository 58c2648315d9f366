"""Prometheus metrics of the index of cached prefixes."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import by_label, edge, single, value_family
from services.gateway.core.prefix_index.node_view import DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex


@dataclass(slots=True)
class ReaderCounts:
    """Counts of the reader that updates the index, since the gateway's start. A node is a replica's
    KV pool, whose changes arrive as entries of a log or as messages.
    """

    entries: int = 0
    """Number of applied entries of Redis's log, or of messages from pools."""
    damaged: int = 0
    """Number of log entries, and of nodes' records, leases and snapshots, that were skipped because
    they could not be decoded.
    """
    gaps: int = 0
    """Number of times that entries of a node were missing."""
    drifts: int = 0
    """Number of times that a node's digest of its block keys differed from the index's digest."""
    loads: int = 0
    failures: int = 0
    """Number of failed calls of Redis, or failed streams of pools."""


class IndexCollector(Collector):
    """The state of the index and the counts of its reader, read at each scrape. Each possible state
    has a series, whose value is 1 for the current state and 0 for any other state.
    """

    def __init__(self, index: PrefixIndex, counts: ReaderCounts) -> None:
        self._index = index
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        index, counts = self._index, self._counts
        yield by_label(edge.INDEX_STATE, {one.value: index.state is one for one in DirectoryState})
        nodes = value_family(edge.INDEX_NODE_STATE)
        for view in index.views:
            for name in DirectoryState:
                nodes.add_metric([view.node, name.value], index.node_state(view.node) is name)
        yield nodes
        for metric, value in (
            (edge.INDEX_KEYS, index.num_keys),
            (edge.INDEX_ENTRIES, counts.entries),
            (edge.INDEX_DAMAGED, counts.damaged),
            (edge.INDEX_GAPS, counts.gaps),
            (edge.INDEX_DRIFTS, counts.drifts),
            (edge.INDEX_LOADS, counts.loads),
            (edge.INDEX_FAILURES, counts.failures),
        ):
            yield single(metric, value)
