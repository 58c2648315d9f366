"""Prometheus counters of each tenant."""

from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter

from services.common.telemetry import names
from services.common.telemetry.metric_specs import SPECS
from services.gateway.core.request.generation import Usage

MAX_TENANTS = 256
OTHERS = "(others)"
"""The label of all tenants after the first MAX_TENANTS. It bounds the number of series."""


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
        # The series is cached by its labels, since a flood is refused many times a second.
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
