"""The leaf spans of a trace cover all of its request's time, even with preemptions, pauses and
kills. `python -m benchmarks.soak traces` checks this with 200 requests.
"""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.spans import SpanRecord
from benchmarks.soak.trace_checks import TracedRequest, check_traces
from services.common.telemetry import names
from tests.benchmarks.programs import run_program
from tests.e2e.conftest import TinyModel

TRACE, CLIENT = b"t" * 16, b"c" * 8
SECOND = 10**9
REQUESTS = [TracedRequest(TRACE, CLIENT, sent=SECOND, answered=11 * SECOND)]
ROOT, ENGINE, REQUEST, WAIT, DECODE, RESUBMIT = 0, 4, 6, 8, 9, 3


def test_parts_add_up_and_no_wait_lacks_a_reason(tiny_model: TinyModel) -> None:
    # All requests may end just before a pause begins, so one visible pause of three is enough.
    flags = ("--requests", 24, "--kills", 1, "--pauses", 3)
    report = run_program("soak", "traces", *flags, "--model", tiny_model.directory).stdout
    assert "| requests | 24 |" in report
    assert "| faults | 0 |" in report
    for seen in (names.SPAN_REQUEST_PAUSE, "cause no_blocks", "cause pool_lost", "wait.no_blocks"):
        assert f"| {seen} | " in report, report


def span(
    name: str, number: int, parent: int, start: int, end: int, **rest: str | int | float
) -> SpanRecord:
    """A span. `start` and `end` are in seconds, and `parent` is the number of the parent span."""
    return SpanRecord(
        name,
        TRACE,
        start * SECOND,
        end * SECOND,
        {f"stepwell.{name}": value for name, value in rest.items()},
        (),
        {},
        bytes([number]),
        bytes([parent]) if parent else CLIENT,
    )


def good_spans() -> list[SpanRecord]:
    decode: dict[str, Any] = {
        "compute_seconds": 2.0,
        "others_prefill_seconds": 0.5,
        "overhead_seconds": 0.5,
    }
    return [
        span("chat tiny", 1, 0, 1, 11),
        span("gateway.parse", 2, 1, 1, 2),
        span("gateway.generate", 3, 1, 2, 11),
        span("gateway.resubmit", 4, 3, 2, 3, **{"sequence": 0, "resubmit.cause": "queue_full"}),
        span("gateway.engine", 5, 3, 3, 11, sequence=0, outcome="finished"),
        span("gateway.send", 6, 5, 3, 4),
        span("scheduler.request", 7, 5, 4, 9, finish_reason="length"),
        span("scheduler.queue", 8, 7, 4, 6),
        span("wait.budget", 9, 8, 4, 6, wait_reason="budget"),
        span("scheduler.decode", 10, 7, 6, 9, **decode),
        span("gateway.receive", 11, 5, 9, 11),
        span("kvpool.admit", 12, 5, 5, 6),
    ]


def test_a_trace_that_is_whole_has_no_fault() -> None:
    report = check_traces(good_spans(), REQUESTS, [])
    assert report.is_good
    assert report.p99_unexplained == 0
    assert report.elsewhere == [0]


@pytest.mark.parametrize(
    ("index", "change", "fault"),
    [
        (1, {"start": SECOND + SECOND // 2}, ""),
        (DECODE, {"start": 7 * SECOND}, "is divided into 3 s"),
        (WAIT, {"start": 5 * SECOND}, ""),
        (WAIT, {"attributes": {}}, "has the reason None"),
        (RESUBMIT, {"attributes": {"stepwell.sequence": 0}}, "no stepwell.resubmit.cause"),
        (DECODE, {"parent_id": b"unknown"}, "has a parent that was not received"),
        (DECODE, {"end": 10 * SECOND}, "after its parent scheduler.request"),
        (REQUEST, {"end": 12 * SECOND}, "after its parent gateway.engine"),
        (ENGINE, {"start": 0}, "before its parent gateway.generate"),
        (ROOT, {"start": SECOND // 2}, "begins before its client sent it"),
        (DECODE, {"end": 0}, "ends at 0"),
        (REQUEST, {"name": "other"}, "has no scheduler.request"),
        (ENGINE, {"name": "other"}, "has no gateway.engine"),
        (ROOT, {"parent_id": b"unknown"}, "has 0 spans under the client's"),
    ],
)
def test_each_fault_of_a_trace_is_found(index: int, change: dict[str, Any], fault: str) -> None:
    spans = good_spans()
    spans[index] = replace(spans[index], **change)
    report = check_traces(spans, REQUESTS, [])
    assert not report.is_good
    assert any(fault in found for found in report.faults) == bool(fault)


def test_the_sequence_that_is_explained_worst_counts() -> None:
    """The leaf spans of the second sequence leave a tenth of the time unexplained."""
    second = [
        span("gateway.route", 21, 3, 2, 3, sequence=1),
        span("gateway.engine", 22, 3, 3, 10, sequence=1, outcome="finished"),
        span("scheduler.request", 23, 22, 3, 10, finish_reason="stop"),
    ]
    report = check_traces([*good_spans(), *second], REQUESTS, [])
    assert report.faults == []
    assert report.p99_unexplained == pytest.approx(0.1)
