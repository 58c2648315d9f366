"""Trace contexts and spans. Spans of unsampled traces are not recorded."""

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN, SpanKind

from services.common.telemetry.trace_context import parse_traceparent
from services.common.telemetry.tracing import configure_tracing, endpoint_urls
from tests.traceparents import traceparent_of

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"

HEX = "0123456789abcdef"


@given(
    trace_id=st.integers(1, 2**128 - 1),
    span_id=st.integers(1, 2**64 - 1),
    flags=st.integers(0, 255),
)
def test_a_well_formed_context_is_read(trace_id: int, span_id: int, flags: int) -> None:
    context = parse_traceparent(f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}")
    assert context is not None
    assert (context.trace_id, context.span_id, context.is_remote) == (trace_id, span_id, True)
    assert bool(context.trace_flags & 1) == bool(flags & 1)


@given(st.text(max_size=70))
def test_any_text_is_read_or_passed_over(text: str) -> None:
    context = parse_traceparent(text)
    assert context is None or context.is_valid


@given(st.text(alphabet=HEX + "-+_ xX", min_size=55, max_size=55))
def test_what_looks_like_one_is_read_exactly(text: str) -> None:
    context = parse_traceparent(text)
    if context is not None:
        assert text.split("-")[1:3] == [f"{context.trace_id:032x}", f"{context.span_id:016x}"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"0x-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-+{TRACE_ID[1:]}-{SPAN_ID}-01",
        f"00-{TRACE_ID[:-2]}_1-{SPAN_ID}-01",
        f"00-{TRACE_ID}-0x{SPAN_ID[2:]}-01",
    ],
)
def test_what_is_malformed_is_passed_over(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_later_version_may_say_more() -> None:
    context = parse_traceparent(f" cc-{TRACE_ID}-{SPAN_ID}-01-what-else ")
    assert context is not None
    assert context.span_id == int(SPAN_ID, 16)


def test_without_an_endpoint_nothing_is_recorded() -> None:
    tracing = configure_tracing("scheduler", "", 1.0)
    assert not tracing.enabled
    span = tracing.start("step", SAMPLED)
    assert span is INVALID_SPAN
    assert traceparent_of(span) == ""
    tracing.shutdown()


def test_a_child_span_is_sampled_if_its_parent_is() -> None:
    exporter = InMemorySpanExporter()
    tracing = configure_tracing("scheduler", "", 0.0, exporter=exporter)
    child = tracing.start("queue", SAMPLED, kind=SpanKind.CLIENT, attributes={"a": 1})
    assert traceparent_of(child).startswith(f"00-{TRACE_ID}-")
    child.end()
    unsampled = tracing.start("queue", UNSAMPLED)
    assert traceparent_of(unsampled) == ""
    unsampled.end()
    (span,) = exporter.get_finished_spans()
    assert span.context.trace_id == int(TRACE_ID, 16)
    assert span.parent is not None
    assert span.parent.span_id == int(SPAN_ID, 16)
    assert (span.kind, dict(span.attributes or {})) == (SpanKind.CLIENT, {"a": 1})
    tracing.shutdown()


@pytest.mark.parametrize(("ratio", "recorded"), [(0.0, 0), (1.0, 20)])
def test_the_first_span_of_a_trace_is_sampled_by_ratio(ratio: float, recorded: int) -> None:
    exporter = InMemorySpanExporter()
    tracing = configure_tracing("scheduler", "", ratio, exporter=exporter)
    for _ in range(20):
        span = tracing.start("step")
        assert bool(traceparent_of(span)) == bool(recorded)
        span.end()
    assert len(exporter.get_finished_spans()) == recorded
    tracing.shutdown()


def test_a_span_without_a_parent_begins_a_trace_of_its_service() -> None:
    exporter = InMemorySpanExporter()
    tracing = configure_tracing("scheduler", "", 1.0, exporter=exporter)
    tracing.start("step").end()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert span.resource.attributes["service.name"] == "stepwell-scheduler"
    tracing.shutdown()


def test_a_collector_that_hangs_does_not_hold_up_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        tracing = configure_tracing("scheduler", f"http://127.0.0.1:{port}", 1.0)
        tracing.start("a span that is not taken").end()
        began = time.monotonic()
        tracing.shutdown()
        assert time.monotonic() - began < 8, "an export may take 10 s"


def test_empty_parts_of_a_list_of_endpoints_are_ignored() -> None:
    """An exporter with an empty URL would send to localhost."""
    assert endpoint_urls("http://one:4317, ,https://two:4317,") == [
        "http://one:4317",
        "https://two:4317",
    ]
    assert not endpoint_urls(" , ")
