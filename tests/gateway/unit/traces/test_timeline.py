"""The timeline of a request at the gateway: consecutive parts that add up to its whole time."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.routing_decision import RoutingDecision, RoutingReason
from services.gateway.core.traces.sequence_trace import (
    ResubmitCause,
    SequenceTrace,
    engine_span_number,
)
from services.gateway.core.traces.timeline import MAX_STRETCHES, Part, Timeline


def parts(timeline: Timeline) -> list[tuple[Part, int]]:
    return [(stretch.part, stretch.began) for stretch in timeline.stretches]


def test_each_part_begins_where_the_one_before_it_ends() -> None:
    timeline = Timeline(count(10).__next__, Part.ADMIT, began=3)
    timeline.enter(Part.READ)
    timeline.enter(Part.READ)  # the part continues
    timeline.enter(Part.PARSE)
    timeline.end("done")
    timeline.end("again")
    timeline.enter(Part.WRITE)  # has no effect after the end
    assert parts(timeline) == [(Part.ADMIT, 3), (Part.READ, 10), (Part.PARSE, 11)]
    assert (timeline.ended, timeline.stretches[-1].outcome) == (12, "done")
    assert timeline.nanos_of(Part.ADMIT, Part.PARSE) == 7 + 1


@given(st.lists(st.sampled_from(Part), max_size=2 * MAX_STRETCHES))
def test_the_parts_are_all_of_the_time_and_bounded(entered: list[Part]) -> None:
    timeline = Timeline(count(1).__next__, Part.ADMIT)
    for part in entered:
        timeline.enter(part)
    timeline.end()
    assert timeline.ended is not None
    assert timeline.nanos_of(*Part) == timeline.ended - timeline.began
    assert len(timeline.stretches) <= MAX_STRETCHES
    num_changes = sum(
        one is not other for one, other in zip([Part.ADMIT, *entered], entered, strict=False)
    )
    assert len(timeline.stretches) + timeline.num_dropped >= min(num_changes + 1, MAX_STRETCHES)


def test_a_sequence_knows_where_it_was_and_why_it_left() -> None:
    trace = SequenceTrace(2, "r-2", count(100).__next__)
    trace.sent(RoutingDecision("a:1", RoutingReason.ONLY, 1))
    trace.left(ResubmitCause.SCHEDULER_LOST)
    trace.found_no_replica()  # waits for a replica, still because of the loss
    trace.timeline.enter(Part.ROUTE)
    trace.sent(RoutingDecision("b:1", RoutingReason.LEAST_LOADED, 2))
    trace.timeline.end("finished")
    assert [part for part, _ in parts(trace.timeline)] == [
        Part.ROUTE,
        Part.ENGINE,
        Part.RESUBMIT,
        Part.ROUTE,
        Part.ENGINE,
    ]
    assert [stretch.outcome for stretch in trace.timeline.stretches] == [
        "",
        "scheduler_lost",
        "",
        "",
        "finished",
    ]
    assert trace.stays == {"a:1": engine_span_number(2, 1), "b:1": engine_span_number(2, 2)}


def test_the_spans_of_all_stays_have_numbers_of_their_own() -> None:
    numbers = [engine_span_number(index, sent) for index in range(40) for sent in range(1, 65)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) == 1
    assert engine_span_number(3, 1000) == engine_span_number(3, 64)
