"""The output of `stepwell trace`, for one trace and for a list of requests."""

from typing import Any

import pytest

from services.cli.trace import listing
from services.cli.views.waterfall import in_ascii, waterfall

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def span(name: str, depth: int, start: float, seconds: float, **given: Any) -> dict[str, Any]:
    fields = {"service": "stepwell-scheduler", "error": None, "attributes": {}, "events": []}
    return {"name": name, "depth": depth, "start": start, "seconds": seconds} | fields | given


def trace(
    *spans: dict[str, Any],
    is_complete: bool = True,
    is_running: bool = False,
    time: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "trace_id": TRACE_ID,
        "request_id": "cmpl-1",
        "is_complete": is_complete,
        "is_running": is_running,
        "time": time,
        "spans": list(spans),
    }


WHOLE = trace(
    span("chat demo", 0, 0.0, 2.0, service="stepwell-gateway", attributes={"gen_ai.x": 1}),
    span("wait", 1, 0.0, 0.5, attributes={"stepwell.wait_reason": "no_blocks", "stepwell.n": 0}),
    span("decode", 1, 0.5, 1.5, events=[{"name": "preempted", "at": 1.0, "attributes": {"n": 3}}]),
    span("instant", 2, 1.0, 0.0, service="stepwell-worker", error="it failed"),
)


def test_bars_lie_where_the_spans_do() -> None:
    lines = [line.plain for line in waterfall(WHOLE, 60)]
    assert lines == [
        f"cmpl-1  2.00 s  trace {TRACE_ID}",
        "chat demo   ██████████████████████████████████████    2.00 s",
        "  wait      ░░░░░░░░░░                                500 ms",
        "    wait_reason no_blocks",
        "  decode             █████████████████████████████    1.50 s",
        "    ◆ preempted at 1.00 s  n 3",
        "    instant                    ▏                         0 s",
        "      it failed",
        "█ gateway  █ scheduler  █ worker  ░ waits",
    ]


@pytest.mark.parametrize("width", [1, 40, 61, 100, 300])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    lines = waterfall(WHOLE, width)
    assert max(len(line) for line in lines) <= max(width, 40)
    bars = [line.plain for line in lines if "█" in line.plain or "░" in line.plain][:-1]
    assert len({len(bar) for bar in bars}) == 1


def test_every_attribute_has_a_line_of_its_own_where_all_are_wanted() -> None:
    lines = [line.plain.strip() for line in waterfall(WHOLE, 80, every_attribute=True)]
    assert {"gen_ai.x 1", "stepwell.wait_reason no_blocks", "stepwell.n 0"} <= set(lines)


def test_what_the_name_says_is_not_said_again() -> None:
    wait = span("wait.no_blocks", 0, 0.0, 1.0, attributes={"stepwell.wait_reason": "no_blocks"})
    assert len(waterfall(trace(wait), 60)) == 3


def test_a_trace_that_is_not_complete_says_why() -> None:
    (first, *_) = waterfall(trace(span("queue", 0, 0.0, 0.1), is_complete=False), 120)
    assert "not complete: further spans will arrive" in first.plain
    so_far = trace(span("queue", 0, 0.0, 0.1), is_complete=False, is_running=True)
    assert "running: these are its spans so far" in waterfall(so_far, 120)[0].plain
    assert waterfall(trace(), 80)[0].plain.startswith("cmpl-1  0 s")


def test_a_terminal_without_utf8_gets_ascii() -> None:
    lines = [in_ascii(line).plain for line in waterfall(WHOLE, 60)]
    assert all(line.isascii() for line in lines)
    assert lines[1].count("#") == 38


def test_requests_in_a_table() -> None:
    attributes = {
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 34,
        "gen_ai.response.time_to_first_chunk": 0.02,
    }
    fine = {
        "trace_id": TRACE_ID,
        "request_id": "cmpl-1",
        "started_unix_seconds": 100.0,
        "seconds": 1.5,
        "error": None,
        "is_running": False,
        "attributes": attributes,
    }
    failed = fine | {"request_id": "", "error": "the queue is full", "attributes": {}}
    wrong = fine | {"attributes": {"stepwell.client_error": "invalid_argument"}}
    assert listing([wrong], "newest", 103.0)[1].endswith("  invalid_argument")
    assert listing([fine | {"is_running": True}, fine, failed], "newest", 103.0) == [
        "   AGE    TOOK    FIRST   TOKENS  REQUEST                           STATUS",
        "3.00 s  1.50 s  20.0 ms   12 + …  cmpl-1                            running",
        "3.00 s  1.50 s  20.0 ms  12 + 34  cmpl-1                            ok",
        f"3.00 s  1.50 s        -    - + -  {TRACE_ID}  the queue is full",
    ]
    assert "no request that failed" in listing([], "failed", 0.0)[0]


def test_the_parts_of_the_time_come_first_and_are_explained_at_the_end() -> None:
    parts = [
        {"name": "blocks", "explanation": "Too few were free.", "waited_for": "cmpl-2", "step": 7},
        {"name": "decode", "explanation": "It decoded.", "waited_for": None, "step": None},
    ]
    time = {"line": "2.0 s = blocks 0.5 · decode 1.5", "seconds": 2.0, "parts": parts}
    lines = [line.plain for line in waterfall(trace(span("chat", 0, 0.0, 2.0), time=time), 60)]
    assert lines[1] == "2.0 s = blocks 0.5 · decode 1.5"
    assert lines[-4:] == [
        "█ scheduler  ",
        "blocks: Too few were free. Request cmpl-2 held most of the",
        "  missing resource. The longest wait began with step 7.",
        "decode: It decoded.",
    ]


def test_nothing_is_cut_off_on_a_screen_of_80_characters() -> None:
    said = {f"stepwell.name_{number}": f"value-{number}" for number in range(12)}
    trace = {**WHOLE, "is_running": True, "spans": [{**WHOLE["spans"][0], "attributes": said}]}
    lines = [line.plain for line in waterfall(trace, 80)]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert all(f"name_{number} value-{number}" in text for number in range(12))
    assert "running: these are its spans so far" in text
