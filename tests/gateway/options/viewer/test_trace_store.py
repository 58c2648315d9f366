"""The trace store stays within its limits, and keeps slow and failed requests."""

import itertools

from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from services.gateway.options.viewer.core.trace_store import SpanRole, StoredSpan, TraceStore
from services.gateway.options.viewer.traces.sampler import AtMostPerMinute

NUMBERS = itertools.count()


def encoded(size: int) -> bytes:
    """Bytes of a span, `size` long and different from all others."""
    return f"{next(NUMBERS):0{size}}".encode()


def request(request_id: str = "", size: int = 10, *, is_wanted: bool = False) -> StoredSpan:
    return StoredSpan("gateway", encoded(size), SpanRole.REQUEST, request_id, is_wanted=is_wanted)


def part(size: int = 10) -> StoredSpan:
    return StoredSpan("scheduler", encoded(size))


def step(size: int = 10) -> StoredSpan:
    return StoredSpan("scheduler", encoded(size), SpanRole.STEP)


def kept(store: TraceStore) -> list[str]:
    return [trace.trace_id for trace in store.requests()]


def test_the_last_requests_are_listed_first() -> None:
    store = TraceStore(max_traces=4, max_bytes=10_000)
    for name in "abc":
        store.add(name, part())
    for name in "bca":
        store.add(name, request())
    assert kept(store) == ["a", "c", "b"]
    assert store.num_bytes == 60


def test_the_oldest_request_is_dropped_for_a_new_one() -> None:
    store = TraceStore(max_traces=4, max_bytes=10_000)
    for name in "abcdef":
        store.add(name, request())
    assert kept(store) == ["f", "e", "d", "c"]
    assert store.find("a") is None
    assert store.num_bytes == 40


def test_a_span_that_comes_twice_is_kept_once() -> None:
    store = TraceStore(max_traces=4, max_bytes=10_000)
    first, second = part(), part()
    for span in (first, second, first, second):
        store.add("a", span)
    found = store.find("a")
    assert found is not None
    assert found.spans == [first, second]
    assert store.num_bytes == 20


def test_bytes_bound_it_too() -> None:
    store = TraceStore(max_traces=100, max_bytes=800)
    for number in range(20):
        store.add(str(number), request(size=90))
        assert store.num_bytes <= 800
    assert kept(store) == [str(number) for number in range(19, 11, -1)]


def test_one_trace_takes_an_eighth_of_the_bytes_at_most() -> None:
    store = TraceStore(max_traces=10, max_bytes=800)
    for _ in range(20):
        store.add("a", part(size=30))
    assert store.num_bytes == 90


def test_steps_cannot_displace_requests_that_ended() -> None:
    store = TraceStore(max_traces=8, max_bytes=10_000)
    for name in "abcd":
        store.add(name, request())
    for number in range(50):
        store.add(f"step {number}", step())
    assert kept(store) == ["d", "c", "b", "a"]
    assert len(store) == 8


def test_steps_are_dropped_before_a_request_that_goes_on() -> None:
    store = TraceStore(max_traces=8, max_bytes=10_000)
    store.add("long", part())
    for number in range(50):
        store.add(f"step {number}", step())
    store.add("long", request("cmpl-1"))
    found = store.find("long")
    assert found is not None
    assert len(found.spans) == 2


def test_a_request_is_found_by_its_ids() -> None:
    store = TraceStore(max_traces=8, max_bytes=10_000)
    store.add("aa11", request("cmpl-mine"))
    store.add("bb22", request("chatcmpl-other"))
    for name in ("aa11", "AA11", "cmpl-mine", "mine", "cmpl-mine-0"):
        found = store.find(name)
        assert found is not None, name
        assert found.trace_id == "aa11"
    for name in ("", "ine", "cmpl", "bb2"):
        assert store.find(name) is None, name


def test_an_id_that_is_the_beginning_of_another_is_another_request() -> None:
    store = TraceStore(max_traces=8, max_bytes=10_000)
    store.add("aa", request("cmpl-10"))
    store.add("bb", request("cmpl-1"))
    for name in ("cmpl-10", "10", "cmpl-10-0"):
        found = store.find(name)
        assert found is not None, name
        assert found.trace_id == "aa", name


def test_a_minute_has_so_many_traces_and_as_many_at_once() -> None:
    now = 0.0
    sampler = AtMostPerMinute(ALWAYS_ON, 12, lambda: now)

    def num_sampled(tries: int) -> int:
        results = [sampler.should_sample(None, 1, "request") for _ in range(tries)]
        return sum(result.decision.is_sampled() for result in results)

    assert num_sampled(50) == 12
    now = 10.0
    assert num_sampled(50) == 2
    now = 1000.0
    assert num_sampled(50) == 12


def test_no_limit_is_the_other_samplers_decision() -> None:
    sampler = AtMostPerMinute(ALWAYS_ON, 0, lambda: 0.0)
    assert all(sampler.should_sample(None, 1, "request").decision.is_sampled() for _ in range(100))


def test_requests_that_failed_or_were_slow_are_dropped_last() -> None:
    store = TraceStore(max_traces=8, max_bytes=10_000)
    for name in ("failed", "slow"):
        store.add(name, request(is_wanted=True))
    for number in range(50):
        store.add(str(number), request())
    for name in ("failed", "slow"):
        assert store.find(name) is not None
    assert len(kept(store)) == 8
    for number in range(50):  # when all traces are of failures, some are dropped
        store.add(f"failed {number}", request(is_wanted=True))
    assert len(kept(store)) == 8


def test_what_a_list_has_shown_can_be_read_though_many_come_after_it() -> None:
    store = TraceStore(max_traces=8, max_bytes=800)
    store.add("shown", request(size=50))
    store.shown("shown")
    for number in range(50):
        store.add(str(number), request(size=50))
    assert store.find("shown") is not None
    assert store.num_bytes <= 800
