"""Prometheus metrics of requests with an idempotency key."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry import names
from services.common.telemetry.metric_specs import single, value_family
from services.gateway.core.idempotency.keyed_requests import KeyedRequests
from services.gateway.core.idempotency.sharing import Sharing


class KeyedCollector(Collector):
    """Counts of requests, answers and their logs, read at each scrape."""

    def __init__(self, keyed_requests: KeyedRequests) -> None:
        self._keyed = keyed_requests

    def collect(self) -> Iterator[Metric]:
        """Yields one family for each metric. The metrics of logs are included only if
        answers are shared.
        """
        counts = self._keyed.counts
        requests = value_family(names.METRIC_KEYED_REQUESTS)
        for outcome in ("begun", "attached", "followed", "resumed", "refused"):
            requests.add_metric([outcome], getattr(counts, outcome))
        yield requests
        yield single(names.METRIC_KEYED_ANSWERS, len(self._keyed))
        yield single(names.METRIC_KEYED_BYTES, self._keyed.num_bytes)
        yield single(names.METRIC_KEYED_SUSPENDED, counts.suspended)
        yield single(names.METRIC_KEYED_EVICTED, counts.evicted)
        if self._keyed.sharing is not None:
            yield from _of_logs(self._keyed.sharing)


def _of_logs(sharing: Sharing) -> Iterator[Metric]:
    counts = sharing.counts
    for name, value in (
        (names.METRIC_KEYED_SHARED, sharing.is_reachable),
        (names.METRIC_KEYED_ENTRIES, counts.entries),
        (names.METRIC_KEYED_ALONE, counts.alone),
        (names.METRIC_KEYED_FENCED, counts.fenced),
        (names.METRIC_KEYED_LOST, counts.lost),
        (names.METRIC_KEYED_DAMAGED, counts.damaged),
        (names.METRIC_KEYED_FAILURES, counts.failures),
    ):
        yield single(name, value)
