"""Prometheus metrics of tenants' queues."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common import names
from services.common.metric_specs import value_family
from services.gateway.core.admission.admission import Admission

MAX_TENANTS = 256
OTHERS = "(others)"
"""The label of all tenants but those that ask most, so that series stay bounded."""


class TenantQueueCollector(Collector):
    """What waits and what runs of each tenant that asks, read at each scrape."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """One family for each metric."""
        uses = sorted(self._admission.places, key=lambda use: -use.num_waiting - use.num_running)
        for metric, attribute in (
            (names.METRIC_TENANT_NUM_WAITING, "num_waiting"),
            (names.METRIC_TENANT_NUM_RUNNING, "num_running"),
        ):
            gauge = value_family(metric)
            for use in uses[:MAX_TENANTS]:
                gauge.add_metric([use.tenant.tenant_id], getattr(use, attribute))
            if len(uses) > MAX_TENANTS:
                rest = sum(getattr(use, attribute) for use in uses[MAX_TENANTS:])
                gauge.add_metric([OTHERS], rest)
            yield gauge
