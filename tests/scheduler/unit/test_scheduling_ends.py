"""How requests end: by themselves, by an abort, or because the model's logits are NaN."""

from typing import Any

import pytest

from services.common.request.finish import FinishReason
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.scheduler.core.output import ModelRunnerOutput
from services.scheduler.core.request import Request
from tests.scheduler.paged_model import continuation, next_token
from tests.scheduler.story import Story, prompt

SAID = continuation(prompt(5), 10)


def says_the_same_again(token_ids: list[int]) -> list[int]:
    """The tokens, extended by one that makes the model repeat it."""
    return next(
        longer for token in range(1000) if next_token(longer := [*token_ids, token]) == token
    )


REPEATS = says_the_same_again(prompt(9))
SAME = REPEATS[-1]


async def test_max_tokens_ends_a_request() -> None:
    story = Story()
    request = story.add("a", prompt(5), max_tokens=3)
    await story.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.token_ids[5:] == SAID[:3]


async def test_the_models_length_ends_a_request() -> None:
    story = Story(max_model_len=8)
    request = story.add("a", prompt(5), max_tokens=100)
    await story.run()
    assert (request.finish_reason, len(request.token_ids)) == (FinishReason.LENGTH, 8)


async def test_end_of_sequence_is_part_of_the_output_and_names_no_stop_token() -> None:
    story = Story()
    request = story.add("a", prompt(5), eos=[SAID[2]])
    await story.run()
    assert (request.finish_reason, request.stop_token_id) == (FinishReason.STOP, None)
    assert request.token_ids[5:] == SAID[:3]


@pytest.mark.parametrize(
    ("eos", "stop", "max_tokens", "reason", "named"),
    [
        ([SAID[2]], [SAID[2]], 3, FinishReason.STOP, None),
        ([], [SAID[2]], 3, FinishReason.STOP, SAID[2]),
        ([], [], 3, FinishReason.LENGTH, None),
    ],
    ids=["end of sequence first", "then stop tokens", "then length"],
)
async def test_reasons_have_an_order(
    eos: list[int], stop: list[int], max_tokens: int, reason: FinishReason, named: int | None
) -> None:
    story = Story()
    request = story.add("a", prompt(5), eos=eos, stop=stop, max_tokens=max_tokens)
    await story.run()
    assert (request.finish_reason, request.stop_token_id) == (reason, named)
    assert request.num_output_tokens == 3


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_output_that_repeats_itself_ends(async_scheduling: bool) -> None:
    """The output ends with one token twice, which is a pattern of length one."""
    story = Story(async_scheduling=async_scheduling)
    request = story.add("a", REPEATS, num_prompt_tokens=9, repetition=RepetitionDetection(3, 1, 2))
    other = story.add("b", REPEATS, num_prompt_tokens=9, max_tokens=9)
    await story.run()
    assert request.finish_reason is FinishReason.REPETITION
    assert request.token_ids == [*REPEATS, SAME]
    assert (other.finish_reason, other.num_output_tokens) == (FinishReason.LENGTH, 9)
    assert story.pool.core.num_free_blocks == 99


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ({"max_tokens": 2}, FinishReason.LENGTH),
        ({"eos": [SAME]}, FinishReason.STOP),
        ({"min_tokens": 2}, FinishReason.REPETITION),
        ({"min_tokens": 3, "max_tokens": 5}, FinishReason.LENGTH),
    ],
    ids=["length first", "end of sequence first", "as many as must be", "too few yet"],
)
async def test_repetition_comes_last_and_not_before_min_tokens(
    conditions: dict[str, Any], reason: FinishReason
) -> None:
    story = Story()
    request = story.add(
        "a", REPEATS, num_prompt_tokens=9, repetition=RepetitionDetection(1, 1, 2), **conditions
    )
    await story.run()
    assert request.finish_reason is reason


def test_of_several_tokens_those_after_the_repetition_are_left_out() -> None:
    sampling = SamplingParams(max_tokens=100, repetition_detection=RepetitionDetection(2, 2, 2))
    request = Request("a", 1, [5, 6, 5, 6], 2, sampling, max_num_tokens=100)
    assert request.append_output_token_ids([7, 5, 6, 5, 6, 7]) == [7, 5, 6, 5, 6]
    assert request.finish_reason is FinishReason.REPETITION


async def test_a_prompt_may_repeat_itself() -> None:
    story = Story()
    request = story.add("a", REPEATS, max_tokens=4, repetition=RepetitionDetection(1, 1, 2))
    await story.run()
    assert request.finish_reason is FinishReason.LENGTH


async def test_output_it_came_with_counts() -> None:
    story = Story()
    request = story.add("a", prompt(5) + SAID[:4], num_prompt_tokens=5, max_tokens=6)
    await story.run()
    assert request.token_ids[5:] == SAID[:6]


async def test_a_waiting_request_is_aborted_without_a_trace() -> None:
    story = Story()
    request = story.add("a", prompt(5))
    story.scheduler.abort(request)
    assert (request.is_finished, request.finish_reason) == (True, FinishReason.ABORT)
    assert story.waiting == []
    assert not story.scheduler.has_work


async def test_a_running_request_is_aborted_and_gives_everything_back() -> None:
    story = Story()
    a = story.add("a", prompt(5))
    story.add("b", prompt(5, 500), max_tokens=3)
    await story.step()
    story.scheduler.abort(a)
    assert (await story.step()).granted == {"b": 1}
    await story.run()
    assert story.pool.core.num_free_blocks == 99
    assert story.model.num_requests == 0


async def test_an_abort_alone_is_work_until_pool_and_workers_know() -> None:
    story = Story()
    a = story.add("a", prompt(5))
    await story.step()
    story.scheduler.abort(a)
    assert story.scheduler.has_work
    told = await story.step()
    assert (told.granted, told.round_trips) == ({}, 1)
    assert not story.scheduler.has_work
    assert story.model.num_requests == 0


async def test_a_request_aborted_while_its_step_runs_gets_nothing_of_it() -> None:
    story = Story()
    a = story.add("a", prompt(5))
    b = story.add("b", prompt(5, 500), max_tokens=2)
    plan = await story.scheduler.schedule()
    output = story.model.run_plan(plan)
    story.scheduler.abort(a)
    assert list(story.take_in(plan, output)) == ["b"]
    assert a.token_ids == prompt(5)
    await story.run()
    assert b.finish_reason is FinishReason.LENGTH
    assert story.pool.core.num_free_blocks == 99


async def test_a_victim_is_aborted_from_the_queue() -> None:
    story = Story(num_blocks=4)
    story.add("a", prompt(6), max_tokens=3)
    b = story.add("b", prompt(4, 500))
    await story.step()
    assert (await story.step()).preempted == ["b"]
    story.scheduler.abort(b)
    await story.run()
    assert story.pool.core.num_free_blocks == 3


async def test_aborting_what_has_ended_changes_nothing() -> None:
    story = Story()
    request = story.add("a", prompt(5), max_tokens=1)
    await story.run()
    story.scheduler.abort(request)
    assert request.finish_reason is FinishReason.LENGTH
    assert not story.scheduler.has_work


async def test_nan_ends_one_request_and_leaves_the_others() -> None:
    story = Story()
    broken = story.add("a", prompt(5))
    whole = story.add("b", prompt(5, 500), max_tokens=2)
    plan = await story.scheduler.schedule()
    output = story.model.run_plan(plan)
    broken_output = ModelRunnerOutput(output.token_ids, nan_requests=frozenset({0}))
    assert story.take_in(plan, broken_output)["a"] == []
    assert (broken.finish_reason, broken.num_output_tokens) == (FinishReason.NAN_IN_LOGITS, 0)
    await story.run()
    assert whole.finish_reason is FinishReason.LENGTH
    assert story.pool.core.num_free_blocks == 99


async def test_a_place_in_the_batch_is_used_again() -> None:
    story = Story(max_num_seqs=1)
    for number in range(3):
        story.add(f"r{number}", prompt(4), max_tokens=1)
    told = await story.run()
    assert [step.new for step in told[:3]] == [["r0"], ["r1"], ["r2"]]
    assert story.model.num_requests == 0
