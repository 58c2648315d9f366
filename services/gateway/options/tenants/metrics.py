"""Prometheus metrics of each tenant: counters of requests, and numbers of sequences."""

from collections.abc import Iterable, Iterator
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.errors import QuotaExceeded
from services.common.telemetry.metric_specs import value_family
from services.common.telemetry.metric_specs.spec import Source, Specs
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.request.generation import Usage
from services.gateway.options.tenants.core.queues.queue_bounds import TenantQueueFull
from services.gateway.options.tenants.core.queues.tenant_queues import TenantQueues

_specs = Specs(Source.GATEWAY)
REQUESTS = _specs.counter(
    "stepwell_tenant_requests",
    "requests",
    "Requests of a tenant that were answered.",
    *("model_name", "tenant"),
)
TOKENS = _specs.counter(
    "stepwell_tenant_tokens",
    "tokens",
    "Tokens of a tenant's answered requests: prompt, cached (of the prompt), generated.",
    *("model_name", "tenant", "kind"),
)
REFUSALS = _specs.counter(
    "stepwell_tenant_refusals",
    "requests",
    "Requests of a tenant that were refused, by reason.",
    *("model_name", "tenant", "reason"),
)
NUM_WAITING = _specs.gauge(
    "stepwell_tenant_num_waiting",
    "sequences",
    "Sequences of a tenant that wait at the gateway for a slot at a replica.",
    "tenant",
)
NUM_RUNNING = _specs.gauge(
    "stepwell_tenant_num_running", "sequences", "Sequences of a tenant at replicas.", "tenant"
)
SPECS = _specs.all

MAX_TENANTS = 256
"""Limit on the number of tenants with their own time series in each metric. A counter has series
for the tenants that were counted first, and a gauge for the tenants with the most sequences.
"""
OWN_REASONS = tuple(error.reason.lower() for error in (QuotaExceeded, TenantQueueFull))
"""The reasons of refusals by a tenant's limits and queue. These counters begin at 0 with the first
request of the tenant, because Prometheus' rates ignore the first value of a counter.
"""
OTHERS = "(others)"
"""The label of the tenants beyond MAX_TENANTS together."""


class TenantMetrics(Collector):
    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._named: set[str] = set()
        self._registry = CollectorRegistry()
        self._requests, self._tokens, self._refusals = (
            Counter(spec.name, spec.text, spec.labels, registry=self._registry)
            for spec in (REQUESTS, TOKENS, REFUSALS)
        )
        # The series is cached, since a tenant may be refused many times per second.
        self._refusals_for = cache(partial(self._refusals.labels, model_name))

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    def answered(self, record: RequestRecord, usage: Usage) -> None:
        if record.caller == ANYONE:
            return
        label = self._label(record.caller)
        self._requests.labels(self._model, label).inc()
        for kind, count in (
            ("prompt", usage.num_prompt_tokens),
            ("cached", usage.num_cached_tokens),
            ("generated", usage.num_generated_tokens),
        ):
            self._tokens.labels(self._model, label, kind).inc(count)

    def refused(self, tenant: Caller, reason: str) -> None:
        """Counts a refused request. `reason` is the code of the request's error."""
        if tenant != ANYONE:
            self._refusals_for(self._label(tenant), reason).inc()

    def _label(self, tenant: Caller) -> str:
        tenant_id = tenant.caller_id
        if tenant_id not in self._named:
            if len(self._named) >= MAX_TENANTS:
                return OTHERS
            self._named.add(tenant_id)
            for reason in OWN_REASONS:
                self._refusals_for(tenant_id, reason)
        return tenant_id


class TenantQueueCollector(Collector):
    """Counts the waiting and running sequences of each tenant at each scrape of the metrics."""

    def __init__(self, admission: TenantQueues) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        usages = sorted(
            self._admission.slots, key=lambda usage: -usage.num_waiting - usage.num_running
        )
        for metric, attribute in ((NUM_WAITING, "num_waiting"), (NUM_RUNNING, "num_running")):
            gauge = value_family(metric)
            for usage in usages[:MAX_TENANTS]:
                gauge.add_metric([usage.tenant.caller_id], getattr(usage, attribute))
            if len(usages) > MAX_TENANTS:
                rest = sum(getattr(usage, attribute) for usage in usages[MAX_TENANTS:])
                gauge.add_metric([OTHERS], rest)
            yield gauge
