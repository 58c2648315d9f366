"""Prometheus metrics of tenants' queues."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry import names
from services.common.telemetry.metric_specs import value_family
from services.gateway.core.admission.admission import Admission

MAX_TENANTS = 256
OTHERS = "(others)"
"""The label of all tenants except the MAX_TENANTS with most sequences. It bounds
the number of series.
"""


class TenantQueueCollector(Collector):
    """The numbers of waiting and running sequences of each tenant, read at each scrape."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """One family for each metric."""
        usages = sorted(
            self._admission.places, key=lambda usage: -usage.num_waiting - usage.num_running
        )
        for metric, attribute in (
            (names.METRIC_TENANT_NUM_WAITING, "num_waiting"),
            (names.METRIC_TENANT_NUM_RUNNING, "num_running"),
        ):
            gauge = value_family(metric)
            for usage in usages[:MAX_TENANTS]:
                gauge.add_metric([usage.tenant.tenant_id], getattr(usage, attribute))
            if len(usages) > MAX_TENANTS:
                rest = sum(getattr(usage, attribute) for usage in usages[MAX_TENANTS:])
                gauge.add_metric([OTHERS], rest)
            yield gauge
