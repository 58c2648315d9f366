"""The gateway's tracing. Spans are exported to a collector as in the other services, or to the
gateway's own store, or to both.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from services.common.telemetry.tracing import Tracing, configure_tracing, service_tracing
from services.gateway.adapters.traces.keeping import StoreExporter
from services.gateway.core.traces.trace_store import TraceStore
from services.gateway.settings import GatewaySettings

_MAX_STORED_BYTES = 16 * 2**20
"""Limit on the total bytes of the spans in the store. The store keeps at most one trace for each 32
KiB of this limit.
"""


def make_trace_store(settings: GatewaySettings) -> TraceStore | None:
    """Makes the trace store. Returns None if it is not configured."""
    if settings.trace_address is None:
        return None
    return TraceStore(_MAX_STORED_BYTES // 2**15, _MAX_STORED_BYTES)


@contextmanager
def gateway_tracing(
    service: str, settings: GatewaySettings, store: TraceStore | None
) -> Iterator[Tracing]:
    """A context with the tracing that the settings configure. At its end, the remaining spans are
    exported. The limit on traces per minute applies only if there is no collector.
    """
    if store is None:
        with service_tracing(service, settings) as tracing:
            yield tracing
        return
    limit = 0 if settings.otlp_endpoint else settings.trace_store_max_per_minute
    sampler = AtMostPerMinute(TraceIdRatioBased(settings.trace_sample_ratio), limit)
    exporter = StoreExporter(store)
    tracing = configure_tracing(
        service,
        settings.otlp_endpoint,
        settings.trace_sample_ratio,
        exporter=exporter,
        root_sampler=sampler,
    )
    try:
        yield tracing
    finally:
        tracing.shutdown()


class AtMostPerMinute(Sampler):
    """Limits another sampler to `limit` traces per minute. It uses a token bucket with the capacity
    of one minute. 0 means no limit.
    """

    def __init__(
        self, sampler: Sampler, limit: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._sampler = sampler
        self._limit = limit
        self._monotonic = monotonic
        self._left = float(limit)
        self._counted_at = monotonic()

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Returns the other sampler's decision, or DROP if the limit is reached."""
        result = self._sampler.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        if not self._limit or result.decision is Decision.DROP or self._take():
            return result
        return SamplingResult(Decision.DROP, trace_state=trace_state)

    def get_description(self) -> str:
        return f"AtMostPerMinute({self._sampler.get_description()}, {self._limit})"

    def _take(self) -> bool:
        now = self._monotonic()
        earned = (now - self._counted_at) * self._limit / 60
        self._left, self._counted_at = min(self._left + earned, float(self._limit)), now
        if self._left < 1:
            return False
        self._left -= 1
        return True
