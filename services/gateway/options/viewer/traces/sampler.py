"""Limits the number of traces per minute."""

import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes


class AtMostPerMinute(Sampler):
    """Limits another sampler to `limit` traces per minute by a token bucket with a capacity of
    `limit`. 0 means no limit.
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
