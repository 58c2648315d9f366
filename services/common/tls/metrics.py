"""Prometheus metrics of certificates."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import process, value_family
from services.common.tls.credentials import Tls


class TlsCollector(Collector):
    """Exports the validity and reloads of a service's certificates. A None argument is ignored."""

    def __init__(self, *each: Tls | None) -> None:
        self._watches = [tls.watch for tls in each if tls is not None]

    def collect(self) -> Iterator[Metric]:
        left = value_family(process.TLS_SECONDS_LEFT)
        reloads = value_family(process.TLS_RELOADS)
        usable = value_family(process.TLS_FILES_USABLE)
        for watch in self._watches:
            left.add_metric([watch.purpose], watch.seconds_left)
            reloads.add_metric([watch.purpose], watch.num_reloads)
            usable.add_metric([watch.purpose], watch.is_usable)
        return iter((left, reloads, usable) if self._watches else ())
