"""Prometheus metrics of the spans that a service sends to its collectors."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import by_label, process, single
from services.common.telemetry.span_outage import DropReason
from services.common.telemetry.tracing import Tracing


class TracingCollector(Collector):
    """Counts sent spans, and dropped spans by reason. Both are 0 without a collector."""

    def __init__(self, tracing: Tracing) -> None:
        self._senders = tracing.senders

    def collect(self) -> Iterator[Metric]:
        yield single(process.SPANS_SENT, sum(sender.num_sent for sender in self._senders))
        dropped = {
            reason.value: sum(sender.num_dropped[reason] for sender in self._senders)
            for reason in DropReason
        }
        yield by_label(process.SPANS_DROPPED, dropped)
