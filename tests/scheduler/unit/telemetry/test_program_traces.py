"""The tracing spans of an agent's program: one for each turn, with the pause before it."""

from services.common.request.program import DeclaredProgram
from services.common.telemetry import names
from tests.scheduler.story import prompt
from tests.scheduler.traced_story import SECOND, TracedStory


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


async def test_a_wait_says_which_context_is_kept_and_why() -> None:
    story = TracedStory(
        policy="program", num_blocks=41, max_model_len=160, max_num_batched_tokens=200
    )
    retention = story.scheduler.retention
    retention._clock = lambda: story.now / SECOND
    for number in range(1, 40):
        story.scheduler.step_costs.observe(number, number, 1.0 + 0.001 * number)
        story.scheduler.step_costs.observe(1, 101, 11.0)
    for seconds in range(1, 13):
        retention.worth.pauses.ended(b"", "grep", float(seconds))
    job = DeclaredProgram("job", tool="grep", keep_seconds=300)
    story.arrive("paused", prompt(61), max_tokens=4, program=job)
    await story.to_the_end()
    story.arrive("running", prompt(20, 300), max_tokens=60)
    await story.watched_step()
    story.arrive("waits", prompt(80, 600), max_tokens=2)
    await story.to_the_end()
    wait = story.span("wait.retained", "waits")
    assert names.ATTR_WAITED_FOR not in wait.attributes
    assert wait.attributes[names.ATTR_RETAINED] == (
        "kept 16 cached blocks of program job, which pauses for 1.00 s (grep) and continues within "
        "11.00 s with probability 1.00, to be kept for 300 s; to compute them again takes 6.40 s; "
        "one more running request saves 50% of the time per token"
    )
    request = story.span(names.SPAN_REQUEST, "waits").attributes
    assert not request.get("stepwell.time.blocks.request_id")


async def test_requests_without_programs_have_no_such_attributes() -> None:
    story = TracedStory()
    story.arrive("one", prompt(17), max_tokens=4)
    await story.to_the_end()
    assert names.ATTR_PROGRAM not in story.span(names.SPAN_REQUEST, "one").attributes
