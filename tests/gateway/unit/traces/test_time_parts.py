"""The parts of a request's time at the gateway add up to its whole time."""

from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ResourceExhausted
from services.common.telemetry.time_parts import TimePart
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason
from services.gateway.core.traces.sequence_trace import EngineTimes, ResubmitCause, SequenceTrace
from services.gateway.core.traces.time_parts import request_parts
from services.gateway.core.traces.timeline import Part, Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Told:
    """A request with one sequence. The test begins each part of its time, and sets its length."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.timeline = Timeline(self.clock, Part.ADMIT)
        self.wait(1)
        self.timeline.enter(Part.READ)
        self.wait(2)
        self.timeline.enter(Part.TOKENIZE)
        self.wait(4)
        self.timeline.enter(Part.GENERATE)
        self.trace = SequenceTrace(0, "cmpl-a-0", self.clock)

    def wait(self, nanos: int) -> None:
        self.clock.now += nanos

    def sent(self, address: str = "a:1") -> None:
        self.trace.sent(RoutingDecision(address, RoutingReason.HASH, 1))

    def finished(self, *parts: TimePart) -> None:
        nanos = sum(part.nanos for part in parts)
        self.trace.times = EngineTimes(0.0, 0.0, nanos / 1e9, 0.0, parts=parts)
        self.trace.timeline.end("finished")
        self.timeline.enter(Part.WRITE)

    def parts(self, so_far: dict[str, list[TimePart]] | None = None) -> dict[str, int]:
        parts = request_parts(self.timeline, [self.trace], self.clock.now, so_far)
        assert sum(part.nanos for part in parts) == self.clock.now
        return {part.name: part.nanos for part in parts}


def test_a_request_that_queued_and_was_preempted() -> None:
    told = Told()
    told.sent()
    told.wait(100)
    told.finished(
        TimePart("slots", 40), TimePart("blocks", 30, "cmpl-b-0", 7), TimePart("decode", 20)
    )
    told.wait(8)
    assert told.parts() == {"slots": 40, "blocks": 30, "decode": 20, "client": 10, "gateway": 15}


def test_a_tenants_wait_for_its_turn_and_a_replica_that_was_lost() -> None:
    told = Told()
    told.trace.timeline.enter(Part.WAIT, {"stepwell.wait_reason": "turn"})
    told.wait(50)
    told.trace.timeline.enter(Part.ROUTE)
    told.sent()
    told.wait(60)
    told.trace.left(ResubmitCause.SCHEDULER_LOST)
    told.wait(70)
    told.sent("b:1")
    told.wait(80)
    told.finished(TimePart("prefill", 30), TimePart("decode", 50))
    assert told.parts() == {
        "turn": 50,
        "moved": 60,
        "resubmit": 70,
        "prefill": 30,
        "decode": 50,
        "client": 2,
        "gateway": 5,
    }


def test_a_replica_whose_clock_runs_faster_does_not_make_it_longer() -> None:
    told = Told()
    told.sent()
    told.wait(10)
    told.finished(TimePart("prefill", 8), TimePart("decode", 9))
    assert told.parts() == {"prefill": 8, "decode": 2, "client": 2, "gateway": 5}


def test_what_a_replica_has_not_reported_is_told_by_what_came_from_it() -> None:
    told = Told()
    told.sent()
    told.wait(10)
    assert told.parts() == {"queue": 10, "client": 2, "gateway": 5}
    told.trace.admitted = told.clock.now
    told.wait(20)
    told.trace.first_token = told.clock.now
    told.wait(30)
    told.trace.timeline.end("aborted")  # as after a stop string
    seen = {"queue": 10, "prefill": 20, "decode": 30, "client": 2, "gateway": 5}
    assert told.parts() == seen


def test_of_a_request_that_runs_the_parts_so_far_are_shown() -> None:
    told = Told()
    told.sent()
    told.wait(10)
    parts = told.parts({"cmpl-a-0": [TimePart("budget", 6), TimePart("prefill", 3)]})
    assert parts == {"budget": 6, "prefill": 3, "client": 2, "gateway": 6}


def test_the_sequence_that_ended_last_counts() -> None:
    told = Told()
    early = SequenceTrace(0, "cmpl-a-0", told.clock)
    early.timeline.end("finished")
    told.sent()
    told.wait(10)
    told.finished(TimePart("decode", 10))
    parts = request_parts(told.timeline, [early, told.trace], told.clock.now)
    assert {part.name: part.nanos for part in parts} == {"decode": 10, "client": 2, "gateway": 5}


steps = st.sampled_from(["wait", "sent", "left", "refused", "admitted", "no replica", "finished"])


@given(st.lists(st.tuples(steps, st.integers(0, 9)), max_size=200))
def test_every_story_adds_up(story: list[tuple[str, int]]) -> None:
    told = Told()
    for step, nanos in story:
        told.wait(nanos)
        match step:
            case "sent":
                told.sent()
            case "left":
                told.trace.left(ResubmitCause.CANNOT_RUN_STEPS)
            case "refused":
                told.trace.refused(ResourceExhausted("full", reason="QUEUE_FULL"))
            case "admitted":
                told.trace.admitted = told.clock.now
            case "no replica":
                told.trace.found_no_replica()
            case "finished":
                told.finished(TimePart("decode", 17))
    told.parts()
