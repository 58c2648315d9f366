"""Spans are encoded to the same bytes as by the OpenTelemetry SDK."""

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from services.common.telemetry.span_encoding import encoded_spans

HERE = Resource.create({"service.name": "here"})
THERE = Resource.create({"service.name": "there"})
SCOPE = InstrumentationScope("stepwell")


def context(number: int, *, is_remote: bool = False) -> SpanContext:
    state = TraceState([("vendor", f"{number}"), ("other", "x")]) if number % 2 else None
    return SpanContext(2**100 + number, 2**50 + number, is_remote, TraceFlags(1), state)


def span(number: int = 1, resource: Resource = HERE, **fields: Any) -> ReadableSpan:
    return ReadableSpan(
        f"span {number}",
        context(number),
        resource=resource,
        instrumentation_scope=SCOPE,
        start_time=number,
        end_time=number + 5,
        **fields,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"parent": context(7)},
        {"parent": context(8, is_remote=True), "kind": SpanKind.CLIENT},
        {"status": Status(StatusCode.ERROR, "it broke"), "kind": SpanKind.SERVER},
        {
            "attributes": {
                "text": "a",
                "one": 1,
                "yes": True,
                "no": False,
                "share": 1.0,
                "big": 2**40,
            }
        },
        {"attributes": {"less": -1, "texts": ["a", "b"], "numbers": (1, 2.5)}},
        {"links": [Link(context(number)) for number in range(200)]},
        {"links": [Link(context(3, is_remote=True), {"a": "b"}), Link(context(3))]},
        {"events": [Event("began", {"a": 1}, 17), Event("ended", timestamp=18)]},
    ],
)
def test_every_part_of_a_span(fields: dict[str, Any]) -> None:
    for _ in range(2):  # the second time, cached parts are used
        assert encoded_spans([span(**fields)]) == encode_spans([span(**fields)])


def test_spans_of_several_resources() -> None:
    spans = [span(1), span(2, THERE), span(3), span(4, THERE)]
    assert encoded_spans(spans) == encode_spans(spans)
    assert encoded_spans([]) == encode_spans([])


@pytest.mark.parametrize("value", [None, 2**70, "\ud800", [1, None]])
def test_an_attribute_that_otlp_cannot_express_loses_no_span(value: Any) -> None:
    spans = [span(1, attributes={"bad": value, "good": 1}), span(2)]
    as_text = [span(1, attributes={"bad": ascii(value), "good": 1}), span(2)]
    assert encoded_spans(spans) == encode_spans(as_text)
