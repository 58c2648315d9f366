"""The times of a step's hops (such as the transfer of its tokens), from hand-written spans."""

import pytest

from benchmarks.common import hops
from benchmarks.common.hops import HopRun, median_hops
from benchmarks.common.load import RequestTimes
from benchmarks.common.spans import SpanRecord
from services.common.telemetry import names

US = 1_000
PROBE = b"probe"


def span(name: str, trace: int, start: int, end: int, **more: object) -> SpanRecord:
    """A span whose times are given in microseconds."""
    return SpanRecord(
        name=name,
        trace_id=bytes([trace]),
        start=start * US,
        end=end * US,
        attributes=more.get("attributes", {}),
        links=more.get("links", ()),
        events={name: at * US for name, at in more.get("events", {}).items()},
    )


def step(number: int, begin: int, num_tokens: int = 1) -> list[SpanRecord]:
    """A step of one request that takes 1000 us, 700 of them in the worker."""
    attributes = {
        names.ATTR_STEP: number,
        names.ATTR_NUM_REQUESTS: 1,
        names.ATTR_NUM_SCHEDULED_TOKENS: num_tokens,
    }
    return [
        span(names.SPAN_STEP, number, begin, begin + 1000, attributes=attributes, links=(PROBE,)),
        span(names.SPAN_STEP_TRANSACT, number, begin + 10, begin + 60),
        span(names.SPAN_POOL_TRANSACT, number, begin + 30, begin + 40),
        span(names.SPAN_STEP_EXECUTE, number, begin + 100, begin + 980),
        span(
            names.SPAN_WORKER_EXECUTE,
            number,
            begin + 150,
            begin + 900,
            events={"started": begin + 200},
        ),
    ]


def test_a_step_is_taken_apart() -> None:
    run = HopRun(1, begun=0, ended=20_000 * US)
    run.probes[PROBE] = RequestTimes(0, [(2_000 * US, 1), (3_900 * US, 1), (6_100 * US, 1)])
    run.session = [(3, 6_020 * US)]
    # The first step computes a part of the prompt, and the second step the rest and a token.
    spans = [*step(0, 0, 7), *step(1, 1000, 3), *step(2, 2500), *step(3, 5000)]
    found = median_hops(run, spans)
    assert found[hops.PLAN] == 50
    assert found[hops.TRANSACT] == 50
    assert found[hops.POOL] == 10
    assert found[hops.DISPATCH] == 130
    assert found[hops.QUEUE] == 50
    assert found[hops.COMPUTE] == 700
    assert found[hops.TAKE_IN] == 20
    assert found[hops.STEP] == 1000
    assert found[hops.DELIVER] == 20
    # Tokens arrived 0, 400 and 100 us after the ends of their steps, so the median is 100 us. Of
    # these, 20 us are the delivery to the session (the scheduler's stream to a gateway).
    assert found[hops.STREAM] == pytest.approx(100 - 20)


def test_a_step_planned_in_vain_at_the_end_has_no_token() -> None:
    run = HopRun(1, begun=0, ended=20_000 * US)
    run.probes[PROBE] = RequestTimes(0, [(1_100 * US, 1), (3_600 * US, 1)])
    run.session = [(2, 3_540 * US)]
    found = median_hops(run, [*step(1, 0), *step(2, 2500), *step(3, 5000)])
    assert found[hops.STREAM] == pytest.approx(100 - 40)


def test_what_never_happened_has_no_median() -> None:
    found = median_hops(HopRun(1, begun=0, ended=1), [])
    assert set(found.values()) == {None}
