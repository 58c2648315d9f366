"""The trace of a request: phases and their parts have no gaps, and each wait has a reason."""

import pytest

from services.common.request.sampling import SamplingParams
from services.common.telemetry import names
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import PreemptionCause
from services.scheduler.core.ports import PoolLost, WorkersLost
from tests.scheduler.seen_spans import Seen
from tests.scheduler.story import prompt
from tests.scheduler.traced_story import Bar, TracedStory, trace_id_of


def request_bar(start: float, end: float, *phases: Bar) -> Bar:
    return Bar(names.SPAN_REQUEST, start, end, phases)


def queue(start: float, end: float, *waits: Bar) -> Bar:
    return Bar(names.SPAN_REQUEST_QUEUE, start, end, waits)


def prefill(start: float, end: float, *parts: Bar) -> Bar:
    return Bar(names.SPAN_REQUEST_PREFILL, start, end, parts)


def decode(start: float, end: float) -> Bar:
    return Bar(names.SPAN_REQUEST_DECODE, start, end)


def chunk(start: float, end: float) -> Bar:
    return Bar(names.SPAN_PREFILL_CHUNK, start, end)


def wait(reason: str, start: float, end: float) -> Bar:
    return Bar(f"wait.{reason}", start, end)


async def test_a_request_alone_is_a_queue_its_chunks_and_its_decoding() -> None:
    story = TracedStory(max_num_batched_tokens=4)
    story.arrive("a", prompt(6), max_tokens=3)
    story.wait(0.5)
    await story.to_the_end()
    assert story.waterfall("a") == request_bar(
        0,
        4.5,
        queue(0, 0.5, wait("next_step", 0, 0.5)),
        prefill(0.5, 2.5, chunk(0.5, 1.5), chunk(1.5, 2.5)),
        decode(2.5, 4.5),
    )
    first, second = [span for span in story.spans("a") if span.name == names.SPAN_PREFILL_CHUNK]
    assert [part.attributes[names.ATTR_NUM_SCHEDULED_TOKENS] for part in (first, second)] == [4, 2]
    assert second.attributes[names.ATTR_COMPUTE_SECONDS] == pytest.approx(0.9)
    root = story.span(names.SPAN_REQUEST, "a")
    assert {
        name: root.attributes[name]
        for name in (
            names.GENAI_LATENCY_QUEUE,
            names.GENAI_LATENCY_PREFILL,
            names.GENAI_LATENCY_DECODE,
            names.GENAI_LATENCY_INFERENCE,
        )
    } == {
        names.GENAI_LATENCY_QUEUE: 0.5,
        names.GENAI_LATENCY_PREFILL: 2.0,
        names.GENAI_LATENCY_DECODE: 2.0,
        names.GENAI_LATENCY_INFERENCE: 4.0,
    }
    assert root.attributes[names.ATTR_NUM_OUTPUT_TOKENS] == 3


async def test_each_wait_in_the_queue_is_a_span_of_its_reason() -> None:
    story = TracedStory(max_num_seqs=1, num_blocks=5)
    story.arrive("a", prompt(6), max_tokens=2)
    story.arrive("b", prompt(6, 500), max_tokens=1)
    await story.watched_step()
    story.tracer.paused()
    story.wait(10)
    story.tracer.resumed()
    story.wait(0.25)
    await story.to_the_end()
    assert story.waterfall("b").parts[0] == queue(
        0, 12.25, wait("max_seqs", 0, 1), wait("paused", 1, 11.25), wait("max_seqs", 11.25, 12.25)
    )


async def test_a_preemption_is_a_phase_with_its_cause_and_the_wait_that_follows() -> None:
    story = TracedStory(num_blocks=4)
    story.arrive("a", prompt(8), max_tokens=4)
    story.arrive("b", prompt(4, 500), max_tokens=3)
    await story.to_the_end()
    preempted = Bar(names.SPAN_REQUEST_PREEMPTED, 1, 4, (wait("no_blocks", 1, 4),))
    assert story.waterfall("b") == request_bar(
        0,
        6,
        queue(0, 0),
        prefill(0, 1, chunk(0, 1)),
        decode(1, 1),
        preempted,
        prefill(4, 5, chunk(4, 5)),
        decode(5, 6),
    )
    attributes = story.span(names.SPAN_REQUEST_PREEMPTED, "b").attributes
    assert attributes == {
        names.ATTR_CAUSE: "no_blocks",
        names.ATTR_STEP: 1,
        names.ATTR_PREEMPTED_FOR: "a",
        names.ATTR_NUM_LOST_TOKENS: 4,
    }
    first, again = [span for span in story.spans("b") if span.name == names.SPAN_REQUEST_PREFILL]
    assert names.ATTR_IS_RECOMPUTED not in first.attributes
    assert again.attributes[names.ATTR_IS_RECOMPUTED] is True
    root = story.span(names.SPAN_REQUEST, "b").attributes
    assert root[names.ATTR_INTERRUPTED_SECONDS] == 3
    assert root[names.GENAI_LATENCY_INFERENCE] == 6


async def test_who_joins_while_a_step_runs_waits_for_it_behind_others() -> None:
    story = TracedStory()
    story.arrive("a", prompt(4), max_tokens=9)
    ahead = await story.plan()
    story.wait(0.25)
    story.arrive("b", prompt(4, 500), max_tokens=2)
    behind = await story.plan()
    story.complete(ahead)
    story.complete(behind)
    await story.watched_step()
    assert story.waterfall("b") == request_bar(
        0.25,
        3.25,
        queue(0.25, 0.25),
        prefill(0.25, 2.25, wait("step_ahead", 0.25, 1.25), chunk(1.25, 2.25)),
        decode(2.25, 3.25),
    )


async def test_the_times_of_a_decoding_add_up_to_it() -> None:
    story = TracedStory(max_num_batched_tokens=10)
    story.arrive("a", prompt(4), max_tokens=5)
    await story.watched_step()
    story.arrive("b", prompt(12, 500), max_tokens=1)
    story.wait(0.5)
    await story.to_the_end()
    decoded = story.span(names.SPAN_REQUEST_DECODE, "a")
    seconds = {
        name: decoded.attributes[name]
        for name in (
            names.ATTR_COMPUTE_SECONDS,
            names.ATTR_OTHERS_PREFILL_SECONDS,
            names.ATTR_STEP_AHEAD_SECONDS,
            names.ATTR_OVERHEAD_SECONDS,
        )
    }
    # In two of the four steps, 9 of 10 and 3 of 4 tokens belong to the prompt of request b.
    others = 0.9 * (9 / 10 + 3 / 4)
    assert seconds == pytest.approx(
        {
            names.ATTR_COMPUTE_SECONDS: 4 * 0.9 - others,
            names.ATTR_OTHERS_PREFILL_SECONDS: others,
            names.ATTR_STEP_AHEAD_SECONDS: 0,
            names.ATTR_OVERHEAD_SECONDS: 0.5 + 4 * 0.1,
        }
    )
    assert sum(seconds.values()) == pytest.approx(seconds_of(decoded))
    assert decoded.attributes[names.ATTR_NUM_STEPS] == 4
    assert decoded.attributes[names.ATTR_MAX_NUM_REQUESTS] == 2
    assert decoded.attributes[names.ATTR_MEAN_NUM_REQUESTS] == 1.5


async def test_a_step_that_leaves_a_decoding_request_out_is_ahead_of_it() -> None:
    story = TracedStory(max_num_batched_tokens=4, num_blocks=50)
    story.arrive("long", prompt(12), max_tokens=2)
    await story.watched_step()
    # Request b is scheduled after "long", whose prompt uses up the budget of some steps.
    story.arrive("b", prompt(1, 500), max_tokens=3)
    await story.to_the_end()
    decoded = story.span(names.SPAN_REQUEST_DECODE, "b")
    attributes = decoded.attributes
    total = sum(
        attributes[name]
        for name in (
            names.ATTR_COMPUTE_SECONDS,
            names.ATTR_OTHERS_PREFILL_SECONDS,
            names.ATTR_STEP_AHEAD_SECONDS,
            names.ATTR_OVERHEAD_SECONDS,
        )
    )
    assert total == pytest.approx(seconds_of(decoded))


async def test_a_pause_divides_the_decoding() -> None:
    story = TracedStory()
    story.arrive("a", prompt(4), max_tokens=4)
    await story.watched_step()
    in_flight = await story.plan()
    story.tracer.paused()
    story.complete(in_flight)
    story.wait(5)
    story.tracer.resumed()
    await story.to_the_end()
    assert story.waterfall("a").parts[2:] == (
        decode(1, 2),
        Bar(names.SPAN_REQUEST_PAUSE, 2, 7),
        decode(7, 9),
    )
    first, second = [span for span in story.spans("a") if span.name == names.SPAN_REQUEST_DECODE]
    tokens = [span.attributes[names.ATTR_NUM_OUTPUT_TOKENS] for span in (first, second)]
    assert tokens == [1, 2]


async def test_a_short_pause_during_a_step_holds_up_no_request() -> None:
    story = TracedStory()
    story.arrive("a", prompt(4), max_tokens=2)
    in_flight = await story.plan()
    story.tracer.paused()
    story.tracer.resumed()
    story.complete(in_flight)
    await story.to_the_end()
    assert [phase.name for phase in story.waterfall("a").parts] == [
        names.SPAN_REQUEST_QUEUE,
        names.SPAN_REQUEST_PREFILL,
        names.SPAN_REQUEST_DECODE,
    ]


@pytest.mark.parametrize(
    ("lost", "cause"),
    [(PoolLost("the pool was lost"), "pool_lost"), (WorkersLost("gone"), "workers_lost")],
)
async def test_a_loss_is_a_recovery_and_what_its_step_took_is_part_of_it(
    lost: PoolLost | WorkersLost, cause: str
) -> None:
    story = TracedStory()
    story.arrive("a", prompt(4), max_tokens=4)
    await story.watched_step()
    await story.watched_step()
    await story.plan()
    story.wait(3)
    preempted = list(story.scheduler.running)
    story.lose()
    story.tracer.lost(preempted, lost)
    story.wait(2)
    story.tracer.recovered()
    await story.to_the_end()
    assert story.waterfall("a").parts[2:] == (
        decode(1, 2),
        Bar(names.SPAN_REQUEST_RECOVERY, 2, 7, (wait("lost_step", 2, 5), wait("recovery", 5, 7))),
        prefill(7, 8, chunk(7, 8)),
        decode(8, 9),
    )
    attributes = story.span(names.SPAN_REQUEST_RECOVERY, "a").attributes
    assert attributes == {names.ATTR_CAUSE: cause, names.ATTR_CAUSE_MESSAGE: lost.message}


async def test_what_waits_while_pool_or_workers_are_away_waits_for_the_recovery() -> None:
    story = TracedStory()
    story.tracer.lost([], PoolLost("the pool was lost"))
    story.arrive("a", prompt(4), max_tokens=1)
    story.wait(2)
    story.tracer.recovered()
    await story.to_the_end()
    assert story.waterfall("a").parts[0] == queue(0, 2, wait("recovery", 0, 2))


async def test_what_an_operator_preempts_waits_for_the_next_step() -> None:
    story = TracedStory()
    story.arrive("a", prompt(6), max_tokens=4)
    await story.watched_step()
    story.tracer.preempted(story.scheduler.preempt_all(), PreemptionCause.RESET)
    story.wait(0.5)
    await story.to_the_end()
    preempted = story.span(names.SPAN_REQUEST_PREEMPTED, "a")
    assert preempted.attributes == {names.ATTR_CAUSE: "reset"}
    (bar,) = [part for part in story.waterfall("a").parts if part.name == preempted.name]
    assert bar.parts == (wait("next_step", 1, 1.5),)


async def test_an_end_in_any_phase_closes_it() -> None:
    story = TracedStory(num_blocks=4)
    runner = story.arrive("a", prompt(8), max_tokens=4)
    victim = story.arrive("b", prompt(4, 500))
    waiter = story.arrive("c", prompt(4, 700))
    await story.watched_step()
    await story.watched_step()
    for request in (runner, victim, waiter):
        story.scheduler.abort(request)
    story.tracer.ended([runner, victim, waiter])
    assert story.waterfall("c") == request_bar(0, 2, queue(0, 2, wait("no_blocks", 0, 2)))
    assert story.waterfall("b").parts[-1] == Bar(
        names.SPAN_REQUEST_PREEMPTED, 1, 2, (wait("no_blocks", 1, 2),)
    )
    assert story.waterfall("a").parts[-1] == decode(1, 2)
    root = story.span(names.SPAN_REQUEST, "c").attributes
    assert root[names.ATTR_FINISH_REASON] == "abort"
    assert (root[names.GENAI_LATENCY_QUEUE], root[names.GENAI_LATENCY_INFERENCE]) == (2, 0)


async def test_a_chunk_that_an_end_cuts_short_is_marked() -> None:
    story = TracedStory(max_num_batched_tokens=4)
    request = story.arrive("a", prompt(12))
    await story.watched_step()
    await story.plan()
    story.wait(0.5)
    story.scheduler.abort(request)
    story.tracer.ended([request])
    assert story.waterfall("a").parts[-1] == prefill(0, 1.5, chunk(0, 1), chunk(1, 1.5))
    cut = [span for span in story.spans("a") if span.attributes.get(names.ATTR_IS_CUT)]
    assert len(cut) == 1


async def test_what_runs_when_the_engine_ends_leaves_its_spans() -> None:
    story = TracedStory()
    story.arrive("a", prompt(4))
    await story.watched_step()
    await story.plan()
    story.wait(1)
    story.tracer.stopped()
    assert story.waterfall("a").parts[-1] == decode(1, 2)


# Steps


def steps(story: TracedStory) -> list[Seen]:
    return [span for span in story.spans() if span.name == names.SPAN_STEP]


async def test_a_step_is_sampled_if_a_sampled_request_is_in_it_and_both_link_to_each_other() -> (
    None
):
    story = TracedStory(max_num_batched_tokens=4)
    story.arrive("hidden", prompt(3, 700), max_tokens=2, sampled=False)
    await story.to_the_end()
    assert steps(story) == []
    story.arrive("a", prompt(6), max_tokens=2)
    await story.to_the_end()
    story.arrive("hidden", prompt(3, 700), max_tokens=2, sampled=False)
    await story.to_the_end()
    root = story.span(names.SPAN_REQUEST, "a")
    found = steps(story)
    assert len(found) == 3
    assert all(step.links == (root.span_id,) for step in found)
    parts = [span for span in story.spans("a") if span.links]
    assert [span.name for span in parts] == [
        names.SPAN_PREFILL_CHUNK,
        names.SPAN_PREFILL_CHUNK,
        names.SPAN_REQUEST_DECODE,
    ]
    linked = [link for span in parts for link in span.links]
    assert linked == [step.span_id for step in found]


async def test_a_thousand_requests_in_a_step_are_linked_all() -> None:
    story = TracedStory(
        num_blocks=1100, max_num_seqs=1024, max_num_batched_tokens=1024, max_model_len=40
    )
    for number in range(1024):
        story.arrive(f"{number}", [number % 1000], max_tokens=1)
    await story.to_the_end()
    assert max(len(step.links) for step in steps(story)) == 1024


async def test_a_long_decoding_links_to_its_first_and_last_steps() -> None:
    story = TracedStory(max_model_len=400)
    story.arrive("a", prompt(4), max_tokens=201)
    await story.to_the_end()
    decoded = story.span(names.SPAN_REQUEST_DECODE, "a")
    of_step = {step.attributes[names.ATTR_STEP]: step.span_id for step in steps(story)}
    expected = [of_step[step] for step in (*range(1, 65), *range(137, 201))]
    assert list(decoded.links) == expected
    assert decoded.attributes[names.ATTR_NUM_LINKS_LEFT_OUT] == 200 - 128


# Spans that are exported when a request ends, or later


async def test_the_spans_of_an_unsampled_request_are_there_if_they_are_wanted_later() -> None:
    story = TracedStory()
    story.arrive("a", prompt(4), max_tokens=3, sampled=False)
    await story.to_the_end()
    assert story.spans() == []
    story.tracer.keep("another", f"00-{trace_id_of('a'):032x}-{1:016x}-01")
    story.tracer.keep("a", f"00-{trace_id_of('a'):032x}-{1:016x}-00")
    assert story.spans() == []
    for _ in range(2):
        story.tracer.keep("a", f"00-{trace_id_of('a'):032x}-{1:016x}-01")
    assert story.waterfall("a") == request_bar(
        0, 3, queue(0, 0), prefill(0, 1, chunk(0, 1)), decode(1, 3)
    )


async def test_a_request_whose_spans_are_wanted_while_it_runs_leaves_them_at_its_end() -> None:
    story = TracedStory()
    story.arrive("a", prompt(4), max_tokens=3, sampled=False)
    await story.watched_step()
    story.tracer.keep("a", f"00-{trace_id_of('a'):032x}-{1:016x}-01")
    assert story.spans() == []
    await story.to_the_end()
    assert story.waterfall("a").parts[-1] == decode(1, 3)
    assert len(steps(story)) == 2, "from then on its steps are sampled"


def seconds_of(span: Seen) -> float:
    return (span.end_unix_nanos - span.start_unix_nanos) / 1e9


async def test_each_turn_of_a_session_is_a_request_of_its_own_trace() -> None:
    story = TracedStory()
    session = story.arrive("a", prompt(6), max_tokens=2, resumable=True)
    await story.watched_step()
    await story.watched_step()
    story.arrive("other", prompt(3, first=500), max_tokens=2)
    await story.watched_step()
    await story.watched_step()
    story.wait(3.0)
    input_chunk = InputChunk(
        prompt(2, first=700),
        SamplingParams(max_tokens=3),
        request_id="b",
        traceparent=f"00-{trace_id_of('b'):032x}-{1:016x}-01",
        queued_unix_nanos=story.now,
    )
    story.scheduler.add_chunk(session, input_chunk)
    story.tracer.arrived([session])
    story.wait(0.5)
    await story.watched_step()
    await story.watched_step()
    await story.watched_step()
    first, second = story.waterfall("a"), story.waterfall("b")
    assert (first.start, first.end) == (0, 2), "the turn ends with its last token"
    assert second == request_bar(
        7,
        10.5,
        queue(7, 7.5, wait("next_step", 7, 7.5)),
        prefill(7.5, 8.5, chunk(7.5, 8.5)),
        decode(8.5, 10.5),
    )
    root = story.span(names.SPAN_REQUEST, "b")
    assert root.attributes[names.ATTR_SESSION_WAIT_SECONDS] == 5.0
    assert root.attributes[names.ATTR_NUM_PROMPT_TOKENS] == 9
    assert root.attributes[names.ATTR_NUM_CACHED_TOKENS] == 7
    assert root.attributes[names.ATTR_NUM_OUTPUT_TOKENS] == 3


async def test_steps_are_traced_by_a_ratio_of_their_own_under_a_name_of_their_own() -> None:
    draws = iter([0.0] + [0.5] * 20)
    story = TracedStory(step_sample_ratio=0.1, draw=lambda: next(draws))
    story.arrive("a", prompt(4), max_tokens=5)
    await story.to_the_end()
    steps = [span for span in story.exporter.get_finished_spans() if span.name == names.SPAN_STEP]
    assert [span.attributes[names.ATTR_STEP] for span in steps] == [0]
    assert steps[0].resource.attributes["service.name"] == "stepwell-engine-steps"
    request = story.span(names.SPAN_REQUEST, "a")
    assert request.attributes[names.ATTR_NUM_OUTPUT_TOKENS] == 5
