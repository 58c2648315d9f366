"""The gateway's spans of a request: its server span, which is the root, and the spans below it."""

from dataclasses import dataclass
from itertools import pairwise

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.telemetry import names
from services.common.telemetry.time_parts import EXPLANATIONS
from services.common.telemetry.tracing import Tracing, configure_tracing
from tests.gateway.serving import until


@dataclass
class Trace:
    """The spans of one request. The methods return spans in the order of their start times."""

    root: ReadableSpan
    spans: list[ReadableSpan]

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        children = [
            one for one in self.spans if one.parent and one.parent.span_id == span_id(parent)
        ]
        return sorted(children, key=lambda one: (one.start_time, one.end_time))

    def named(self, name: str) -> list[ReadableSpan]:
        found = [one for one in self.spans if one.name == name]
        return sorted(found, key=lambda one: one.start_time)

    def only(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


class Tracer:
    def __init__(self, ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing: Tracing = configure_tracing("gateway", "", ratio, exporter=self.exporter)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    async def trace(self, number: int = 0) -> Trace:
        """The trace of a finished request. `number` counts requests in the order of their ends."""
        await until(lambda: len(self._roots()) > number)
        root = self._roots()[number]
        assert root.context is not None
        trace_id = root.context.trace_id
        spans = [one for one in self.spans if one.context and one.context.trace_id == trace_id]
        return Trace(root, spans)

    def _roots(self) -> list[ReadableSpan]:
        return [one for one in self.spans if one.kind.name == "SERVER"]


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def assert_adds_up(trace: Trace, *, start_millis: int = 5) -> None:
    """Asserts that the spans of a request follow one another without a gap, that the spans of each
    of its sequences do so, too, and that the durations of the request's parts have the right sum.
    Each sequence must start within `start_millis`.
    """
    assert_follow(trace.root, trace.below(trace.root))
    attributes, nanos = trace.root.attributes, trace.root.end_time - trace.root.start_time
    parts = [attributes.get(f"{names.ATTR_TIME}.{name}", 0.0) for name in EXPLANATIONS]
    assert abs(sum(parts) * 1e9 - nanos) < 10, "the parts of the time add up to it"
    for generate in trace.named("gateway.generate"):
        by_sequence: dict[object, list[ReadableSpan]] = {}
        for one in trace.below(generate):
            by_sequence.setdefault(one.attributes["stepwell.sequence"], []).append(one)
        for stretches in by_sequence.values():
            first, last = stretches[0], stretches[-1]
            assert first.start_time - generate.start_time < start_millis * 1_000_000
            assert last.end_time <= generate.end_time
            for one, following in pairwise(stretches):
                assert one.end_time == following.start_time
    ids = {span_id(one) for one in trace.spans}
    for one in trace.spans:
        assert one is trace.root or one.parent.span_id in ids


def assert_follow(parent: ReadableSpan, children: list[ReadableSpan]) -> None:
    """Asserts that the children cover the whole time of the parent, one after another."""
    assert children[0].start_time == parent.start_time
    assert children[-1].end_time == parent.end_time
    for one, following in pairwise(children):
        assert one.end_time == following.start_time, (one.name, following.name)
