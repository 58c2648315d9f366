"""The parts of a request's time at a replica. A part in which it waits names the request that
occupied the missing blocks, budget or slot.
"""

from services.common.telemetry.time_parts import TimePart
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.ports import WorkersLost
from services.scheduler.core.request import Request
from tests.scheduler.story import prompt
from tests.scheduler.traced_story import SECOND, TracedStory


async def parts_of(story: TracedStory, request: Request) -> list[TimePart]:
    """Runs all requests to their ends. Returns the parts of a request's time, which must add up."""
    await story.to_the_end()
    assert request.times is not None
    assert sum(part.nanos for part in request.times.parts) == sum(request.times[:3])
    return list(request.times.parts)


def part(name: str, seconds: float, waited_for: str = "", step: int | None = None) -> TimePart:
    return TimePart(name, round(seconds * SECOND), waited_for, step)


async def test_a_wait_for_a_slot_names_the_longest_running_request_and_the_step() -> None:
    story = TracedStory(max_num_seqs=1)
    story.arrive("a", prompt(6), max_tokens=2)
    waiting = story.arrive("b", prompt(6, 500), max_tokens=2)
    await story.watched_step()
    story.tracer.paused()
    story.wait(10)
    story.tracer.resumed()
    assert await parts_of(story, waiting) == [
        part("slots", 2, "a", 0),
        part("pause", 10, "", 1),
        part("prefill", 1),
        part("decode", 1),
    ]


async def test_blocks_and_budget_are_held_by_the_request_with_most_of_them() -> None:
    story = TracedStory(num_blocks=6, max_num_batched_tokens=8)
    story.arrive("small", prompt(2, 900), max_tokens=9)
    story.arrive("large", prompt(12), max_tokens=3)
    waiting = story.arrive("b", prompt(12, 500), max_tokens=1)
    parts = {one.name: one for one in await parts_of(story, waiting)}
    assert (parts["blocks"].request_id, parts["budget"].request_id) == ("large", "large")
    assert parts["blocks"].step is not None


async def test_what_a_preemption_costs_is_of_the_request_that_needed_the_blocks() -> None:
    story = TracedStory(num_blocks=4)
    story.arrive("a", prompt(8), max_tokens=4)
    preempted = story.arrive("b", prompt(4, 500), max_tokens=3)
    assert await parts_of(story, preempted) == [
        part("blocks", 3, "a", 1),
        part("prefill", 2),
        part("decode", 1),
    ]


async def test_a_loss_and_a_pause_have_parts_of_their_own() -> None:
    story = TracedStory()
    request = story.arrive("a", prompt(4), max_tokens=4)
    await story.watched_step()
    await story.plan()
    story.wait(3)
    running = list(story.scheduler.running)
    story.lose()
    story.tracer.lost(running, WorkersLost("gone"))
    story.wait(2)
    story.tracer.recovered()
    await story.watched_step()
    story.tracer.paused()
    story.wait(4)
    story.tracer.resumed()
    assert await parts_of(story, request) == [
        part("pause", 4),
        part("recovery", 5),
        part("prefill", 2),
        part("decode", 2),
    ]


async def test_a_structured_output_waits_for_its_grammar() -> None:
    story = TracedStory()
    request = story.arrive("a", prompt(4), grammar=GrammarStatus.COMPILING, max_tokens=1)
    story.wait(2)
    story.scheduler.grammar_compiled(request)
    assert await parts_of(story, request) == [part("grammar", 2), part("prefill", 1)]


async def test_of_many_preemptions_the_parts_are_kept_though_phases_are_merged() -> None:
    story = TracedStory()
    request = story.arrive("a", prompt(4), max_tokens=200)
    for _ in range(100):
        await story.watched_step()
        story.tracer.paused()
        story.wait(1)
        story.tracer.resumed()
    parts = {one.name: one.seconds for one in await parts_of(story, request)}
    assert parts == {"pause": 100, "prefill": 1, "decode": 199}


async def test_waits_are_counted_by_their_reason_when_they_end() -> None:
    story = TracedStory(max_num_seqs=1)
    story.arrive("a", prompt(6), max_tokens=2)
    story.arrive("b", prompt(6, 500), max_tokens=3)
    await story.watched_step()
    assert story.counts.wait_nanos.total() == 0
    await story.watched_step()
    await story.watched_step()
    assert story.counts.wait_nanos["max_seqs"] == 2 * SECOND
    story.tracer.paused()
    story.wait(10)
    story.tracer.resumed()
    await story.to_the_end()
    assert +story.counts.wait_nanos == {"max_seqs": 2 * SECOND, "paused": 10 * SECOND}
