"""Prometheus metrics of each tenant: counters, and the lengths of queues."""

from collections.abc import Iterator
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry import names
from services.common.telemetry.metric_specs import SPECS, value_family
from services.gateway.core.request.generation import Usage
from services.gateway.options.tenants.core.queues.tenant_queues import TenantQueues

MAX_TENANTS = 256
"""Limit on the number of tenants with series of their own. Counters have series for the first
tenants, and gauges for the tenants with the most sequences.
"""
OTHERS = "(others)"
"""The label of all further tenants."""


class TenantMetrics:
    """Counters by tenant."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model = model_name
        self._named: set[str] = set()
        self._requests, self._tokens, self._refusals = (
            Counter(spec.name, spec.text, spec.labels, registry=registry)
            for spec in (
                SPECS[names.METRIC_TENANT_REQUESTS],
                SPECS[names.METRIC_TENANT_TOKENS],
                SPECS[names.METRIC_TENANT_REFUSALS],
            )
        )
        # The series is cached, since a tenant's flood of requests is refused many times a second.
        self._refusals_for = cache(partial(self._refusals.labels, model_name))

    def used(self, tenant_id: str, usage: Usage) -> None:
        """Counts a request that was answered."""
        tenant = self._label(tenant_id)
        self._requests.labels(self._model, tenant).inc()
        for kind, count in (
            ("prompt", usage.num_prompt_tokens),
            ("cached", usage.num_cached_tokens),
            ("generated", usage.num_generated_tokens),
        ):
            self._tokens.labels(self._model, tenant, kind).inc(count)

    def refused(self, tenant_id: str, reason: str) -> None:
        """Counts a refused request. `reason` is the code of its error."""
        self._refusals_for(self._label(tenant_id), reason).inc()

    def _label(self, tenant_id: str) -> str:
        if tenant_id not in self._named:
            if len(self._named) >= MAX_TENANTS:
                return OTHERS
            self._named.add(tenant_id)
        return tenant_id


class TenantQueueCollector(Collector):
    """The numbers of waiting and running sequences of each tenant, read at each scrape."""

    def __init__(self, admission: TenantQueues) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """Yields one family for each metric."""
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
