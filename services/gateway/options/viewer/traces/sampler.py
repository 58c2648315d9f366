"""Limits the number of traces per minute."""

import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from services.gateway.core.traces.trace_limit import TraceLimit


class AtMostPerMinute(Sampler):
    """Limits another sampler to `limit` traces per minute (see `TraceLimit`). 0 means no limit."""

    def __init__(
        self, sampler: Sampler, limit: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._sampler = sampler
        self._limit = TraceLimit(limit) if limit else None
        self._monotonic = monotonic

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
        limit = self._limit
        if limit is None or result.decision is Decision.DROP or limit.take(self._monotonic()):
            return result
        return SamplingResult(Decision.DROP, trace_state=trace_state)

    def get_description(self) -> str:
        return f"AtMostPerMinute({self._sampler.get_description()})"
