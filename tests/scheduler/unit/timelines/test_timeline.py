"""The timeline of a request: phases, and parts of each phase, which follow each other without gaps
even when many are merged.
"""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.adapters.telemetry.step_sums import StepSums
from services.scheduler.core.timelines.phase_parts import (
    MAX_CHUNKS,
    MAX_WAITS,
    Chunk,
    ReasonStart,
    Wait,
)
from services.scheduler.core.timelines.timeline import MAX_PHASES, PhaseKind, StepTotals, Timeline


def chunk(step: int, start: int, end: int) -> Chunk:
    return Chunk(start, end, step, step, 1, 10, 20, 2, end - start)


def assert_covered(timeline: Timeline) -> None:
    end = timeline.queued
    for phase in timeline.phases:
        assert phase.start == end <= phase.end
        end = phase.end
        if phase.parts:
            assert phase.parts[0].start == phase.start
            assert phase.parts[-1].end == phase.end
            for before, after in zip(phase.parts, phase.parts[1:], strict=False):
                assert before.end == after.start
    times = timeline.times()
    assert sum(times[:3]) == end - timeline.queued
    assert sum(part.nanos for part in times.parts) == end - timeline.queued


def test_many_reasons_of_one_wait_become_a_few() -> None:
    timeline = Timeline(0)
    reasons = ("budget", "max_seqs")
    changes = [ReasonStart(10 * number, reasons[number % 2]) for number in range(100)]
    timeline.wait(changes, 1000)
    timeline.finish(1000)
    waits = [part for part in timeline.phases[0].parts if isinstance(part, Wait)]
    assert len(waits) <= MAX_WAITS
    assert sum(wait.reasons["budget"] for wait in waits) == 500
    assert waits[0].reason == "budget"
    assert_covered(timeline)


def test_many_chunks_become_a_few() -> None:
    timeline = Timeline(0)
    timeline.admit(0, 0)
    for step in range(1000):
        # Every second chunk has waited for a step of other requests.
        timeline.add_chunk(chunk(step, 10 * step + 5 * (step % 2), 10 * step + 10), "step_ahead")
    timeline.enter(PhaseKind.DECODE, 10_000)
    timeline.first_token = 10_000
    timeline.finish(10_000)
    parts = timeline.phases[1].parts
    chunks = [part for part in parts if isinstance(part, Chunk)]
    assert len(chunks) <= 2 * MAX_CHUNKS
    assert sum(part.num_steps for part in chunks) == 1000
    assert sum(part.num_tokens for part in chunks) == 10_000
    assert (chunks[0].first_step, chunks[-1].last_step) == (0, 999)
    assert_covered(timeline)


def test_many_phases_become_a_few() -> None:
    timeline = Timeline(0)
    for number in range(200):
        timeline.admit(number, 10 * number + 2)
        timeline.enter(PhaseKind.PREEMPTED, 10 * number + 7)
    timeline.finish(2_000)
    assert len(timeline.phases) == MAX_PHASES
    merged = timeline.phases[1]
    assert merged.kind is PhaseKind.SEVERAL
    assert sum(merged.merged.values()) == merged.nanos
    assert timeline.times().interrupted_nanos == 5 * 199 + 3
    assert_covered(timeline)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "decode", "preempt", "pause", "chunk", "wait"]),
            st.integers(0, 5),
            st.integers(-3, 3),
        ),
        max_size=200,
    )
)
def test_whatever_happens_there_is_no_gap(events: list[tuple[str, int, int]]) -> None:
    timeline, now = Timeline(100), 100
    for step, (event, passed, off) in enumerate(events):
        now += passed
        match event:
            case "admit":
                timeline.admit(step, now)
            case "decode":
                timeline.enter(PhaseKind.DECODE, now)
            case "preempt":
                timeline.enter(PhaseKind.PREEMPTED, now + off)
            case "pause":
                timeline.enter(PhaseKind.PAUSE, now)
            case "chunk":
                now = max(now, timeline.covered_until)
                timeline.add_chunk(chunk(step, now + off, now), "step_ahead")
            case "wait":
                now = max(now, timeline.covered_until)
                timeline.wait([ReasonStart(now + off, "budget"), ReasonStart(now, "max_seqs")], now)
    timeline.finish(now)
    end = timeline.queued
    for phase in timeline.phases:
        assert phase.start == end <= phase.end
        end = phase.end
        at = phase.start
        for part in phase.parts:
            assert at == part.start <= part.end <= phase.end
            at = part.end


def test_the_largest_batch_since_a_step() -> None:
    sums = StepSums()
    for step, size in enumerate([3, 9, 4, 4, 2]):
        sums.add(step, 10 * step, 10, 8, 0, size)
    assert [sums.max_requests_since(step) for step in range(6)] == [9, 9, 4, 4, 2, 0]
    assert sums.totals == StepTotals(5, 50, 40, 0, 22)
