"""Steps with prompts (prefills) are limited to one in each interval, or none during a pause."""

from services.common.replica.pause_mode import PauseMode
from services.common.request.sampling import SamplingParams
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.output import WaitReason
from tests.scheduler.story import Story, prompt


async def test_prompts_are_computed_in_every_third_step_while_a_request_decodes() -> None:
    story = Story(prefill_schedule_interval=3, max_num_batched_tokens=8)
    story.add("a", prompt(4))
    await story.step()
    story.add("b", prompt(20, first=500))
    told = await story.steps(7)
    assert [step.granted.get("b", 0) for step in told] == [0, 0, 7, 0, 0, 7, 0]
    assert all(step.granted["a"] == 1 for step in told)


async def test_prompts_do_not_wait_when_no_request_decodes() -> None:
    story = Story(prefill_schedule_interval=5, max_num_batched_tokens=8)
    story.add("a", prompt(20))
    assert [step.granted for step in await story.steps(3)] == [{"a": 8}, {"a": 8}, {"a": 4}]


async def test_prompts_do_not_wait_when_a_step_left_some_waiting() -> None:
    story = Story(prefill_schedule_interval=5, max_num_batched_tokens=8)
    for name, first in (("a", 100), ("b", 300), ("c", 500)):
        story.add(name, prompt(6, first=first))
    assert [list(step.granted) for step in await story.steps(3)] == [
        ["a", "b"],
        ["a", "b", "c"],
        ["a", "b"],
    ], "the second step left none waiting"


async def test_a_caller_may_let_prompts_wait() -> None:
    story = Story()
    story.add("a", prompt(4))
    await story.step()
    story.add("b", prompt(8, first=500))
    plan = await story.scheduler.schedule(throttle_prefills=True)
    assert [request.request_id for request in plan.requests] == ["a"]
    assert plan.wait_reason is WaitReason.PREFILL_INTERVAL


async def test_a_pause_that_waits_lets_those_go_on_that_hold_blocks() -> None:
    story = Story()
    session = story.add("s", prompt(6), max_tokens=1, resumable=True)
    await story.step()
    story.add("other", prompt(6, first=500))
    story.scheduler.pause(PauseMode.WAIT)
    assert not story.scheduler.has_requests
    story.scheduler.add_chunk(
        session, InputChunk(prompt(2, first=700), SamplingParams(max_tokens=1))
    )
    assert (await story.step()).new == ["s"]
    story.scheduler.resume()
    assert (await story.step()).new == ["other"]


async def test_a_pause_that_keeps_plans_nothing() -> None:
    story = Story()
    story.add("a", prompt(6))
    await story.step()
    story.scheduler.pause(PauseMode.KEEP)
    assert (await story.step()).granted == {}
    story.scheduler.resume()
    assert (await story.step()).granted == {"a": 1}
