"""The spans of a program's turns."""

from services.common.request.program import DeclaredProgram
from services.common.telemetry import names
from tests.scheduler.story import prompt
from tests.scheduler.traced_story import TracedStory


async def test_a_turn_has_its_program_its_pause_and_a_link_to_the_turn_before() -> None:
    story = TracedStory(policy="program")
    job = DeclaredProgram("job", tool="grep")
    first = story.arrive("one", prompt(17), max_tokens=4, program=job)
    await story.to_the_end()
    assert first.program_turn is not None
    before = story.span(names.SPAN_REQUEST, "one").attributes
    assert (before[names.ATTR_PROGRAM], before[names.ATTR_TURN]) == ("job", 1)
    assert names.ATTR_PAUSE_SECONDS not in before
    story.arrive("two", [*first.token_ids, *prompt(5, 700)], max_tokens=4, program=job)
    await story.to_the_end()
    span = story.span(names.SPAN_REQUEST, "two")
    assert span.attributes[names.ATTR_TURN] == 2
    assert span.attributes[names.ATTR_TOOL] == "grep"
    assert span.attributes[names.ATTR_CONTEXT_TOKENS] == 21
    assert span.attributes[names.ATTR_RECOMPUTED_TOKENS] == 0
    assert span.attributes[names.ATTR_PAUSE_SECONDS] >= 0
    assert span.links == (1,), "the span of the gateway that sent the turn before"


async def test_requests_without_programs_have_no_such_attributes() -> None:
    story = TracedStory()
    story.arrive("one", prompt(17), max_tokens=4)
    await story.to_the_end()
    assert names.ATTR_PROGRAM not in story.span(names.SPAN_REQUEST, "one").attributes
