"""The traces of requests explain all of their time, through preemptions, pauses and kills.

`python -m benchmarks.soak traces` does the same with 200 requests.
"""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.spans import SpanRecord
from benchmarks.soak.trace_checks import check_traces
from services.common import names
from tests.benchmarks.programs import run_program
from tests.e2e.conftest import TinyModel

TRACE, CLIENT = b"t" * 16, b"c" * 8


def test_parts_add_up_and_no_wait_lacks_a_reason(tiny_model: TinyModel) -> None:
    flags = ("--requests", 24, "--kills", 1, "--pauses", 1)
    report = run_program("soak", "traces", *flags, "--model", tiny_model.directory).stdout
    assert "| requests | 24 |" in report
    assert "| faults | 0 |" in report
    for seen in (names.SPAN_REQUEST_PAUSE, "cause no_blocks", "cause pool_lost", "wait.no_blocks"):
        assert f"| {seen} | " in report, report


def span(name: str, number: int, parent: bytes, start: int, end: int, **rest: str) -> SpanRecord:
    attributes = {f"stepwell.{name}": value for name, value in rest.items()}
    return SpanRecord(name, TRACE, start, end, dict(attributes), (), {}, bytes([number]), parent)


def good_spans() -> list[SpanRecord]:
    second = 10**9
    return [
        span("chat tiny", 1, CLIENT, second, 5 * second),
        span("scheduler.request", 2, b"\1", second, 5 * second, finish_reason="length"),
        span("scheduler.queue", 3, b"\2", second, 2 * second),
        span("wait.budget", 4, b"\3", second, 2 * second, wait_reason="budget"),
        span("scheduler.decode", 5, b"\2", 2 * second, 5 * second),
    ]


def test_a_trace_that_is_whole_has_no_fault() -> None:
    report = check_traces(good_spans(), [(TRACE, CLIENT)], [])
    assert report.is_good
    assert report.p99_unexplained == 0


@pytest.mark.parametrize(
    ("index", "change", "fault"),
    [
        (4, {"start": 3 * 10**9}, ""),
        (3, {"attributes": {}}, "has the reason None"),
        (4, {"parent_id": b"unknown"}, "has a parent that was not received"),
        (4, {"end": 6 * 10**9}, "after its parent scheduler.request"),
        (4, {"end": 0}, "ends at 0"),
        (1, {"name": "other"}, "has no scheduler.request"),
    ],
    ids=["a gap", "no reason", "an orphan", "an end after its parent's", "no end", "no stay"],
)
def test_each_fault_of_a_trace_is_found(index: int, change: dict[str, Any], fault: str) -> None:
    spans = good_spans()
    spans[index] = replace(spans[index], **change)
    report = check_traces(spans, [(TRACE, CLIENT)], [])
    assert not report.is_good
    assert any(fault in found for found in report.faults) == bool(fault)
