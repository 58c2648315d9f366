"""The token budget of a step is given to running requests in order, and then to waiting ones."""

import pytest

from tests.scheduler.paged_model import continuation
from tests.scheduler.story import Story, prompt


async def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    story = Story(max_num_batched_tokens=8)
    story.add("a", prompt(20), max_tokens=2)
    told = await story.run()
    assert [step.granted for step in told] == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}, {}]
    assert [step.start for step in told[:4]] == [{"a": 0}, {"a": 8}, {"a": 16}, {"a": 20}]
    assert [step.tokens for step in told[:2]] == [{}, {}]
    assert told[2].tokens["a"] + told[3].tokens["a"] == continuation(prompt(20), 2)


async def test_blocks_are_given_for_each_chunk_and_no_earlier() -> None:
    story = Story(max_num_batched_tokens=6)
    story.add("a", prompt(14))
    told = await story.steps(3)
    assert [step.blocks["a"] for step in told] == [[1, 2], [3], [4]]


async def test_decoding_requests_come_first_and_the_prompt_gets_the_rest() -> None:
    story = Story(max_num_batched_tokens=8)
    story.add("a", prompt(3))
    await story.step()
    story.add("b", prompt(20, first=500))
    assert (await story.step()).granted == {"a": 1, "b": 7}
    assert (await story.step()).granted == {"a": 1, "b": 7}
    assert (await story.step()).granted == {"a": 1, "b": 6}
    assert (await story.step()).granted == {"a": 1, "b": 1}


async def test_several_prompts_share_a_step() -> None:
    story = Story(max_num_batched_tokens=10)
    for name, first in (("a", 100), ("b", 300), ("c", 500)):
        story.add(name, prompt(4, first))
    first, second = await story.steps(2)
    assert first.granted == {"a": 4, "b": 4, "c": 2}
    assert first.new == ["a", "b", "c"]
    assert second.granted == {"a": 1, "b": 1, "c": 2}


async def test_a_running_prompt_is_served_before_one_that_waits() -> None:
    story = Story(max_num_batched_tokens=8)
    story.add("a", prompt(12))
    story.add("b", prompt(12, first=500))
    first, second = await story.steps(2)
    assert (first.granted, first.new) == ({"a": 8}, ["a"])
    assert (second.granted, second.new) == ({"a": 4, "b": 4}, ["b"])


async def test_a_budget_below_the_size_of_the_workers_is_kept() -> None:
    story = Story(max_num_batched_tokens=16, max_num_scheduled_tokens=5)
    story.add("a", prompt(12))
    assert [step.granted["a"] for step in await story.steps(3)] == [5, 5, 2]


async def test_no_more_requests_run_than_max_num_seqs() -> None:
    story = Story(max_num_seqs=2)
    for name, first in (("a", 100), ("b", 300), ("c", 500)):
        story.add(name, prompt(4, first), max_tokens=2)
    assert (await story.step()).new == ["a", "b"]
    assert story.waiting == ["c"]
    assert (await story.step()).new == []
    assert (await story.step()).new == ["c"]


async def test_fewer_requests_may_run_than_the_workers_have_rows() -> None:
    story = Story(max_num_seqs=4, max_num_active_seqs=1)
    story.add("a", prompt(4), max_tokens=1)
    story.add("b", prompt(4, first=500), max_tokens=1)
    assert (await story.step()).new == ["a"]
    assert (await story.step()).new == ["b"]


async def test_without_chunks_a_prompt_runs_whole_or_waits() -> None:
    story = Story(max_num_batched_tokens=10, enable_chunked_prefill=False)
    story.add("a", prompt(6))
    story.add("b", prompt(6, first=500))
    story.add("c", prompt(2, first=700))
    first, second = await story.steps(2)
    assert first.granted == {"a": 6}, "no request passes the head of the queue"
    assert second.granted == {"a": 1, "b": 6, "c": 2}


async def test_one_long_prompt_leaves_room_for_others() -> None:
    story = Story(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    story.add("a", prompt(30))
    story.add("b", prompt(4, first=500))
    first, second = await story.steps(2)
    assert first.granted == {"a": 6, "b": 4}
    assert second.granted == {"a": 6, "b": 1}


async def test_the_threshold_is_lifted_for_a_request_that_is_alone() -> None:
    story = Story(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    story.add("a", prompt(30))
    assert (await story.step()).granted == {"a": 16}
    story.add("b", prompt(4, first=500))
    assert (await story.step()).granted == {"a": 6, "b": 4}


@pytest.mark.parametrize(
    ("others", "share"), [(1, 12), (3, 6), (5, 5)], ids=["even share", "quarter", "threshold"]
)
async def test_the_adaptive_threshold_is_an_even_share_where_that_is_more(
    others: int, share: int
) -> None:
    story = Story(
        max_num_batched_tokens=24,
        long_prefill_token_threshold=5,
        long_prefill_token_threshold_adaptive=True,
    )
    story.add("a", prompt(40))
    for number in range(others):
        story.add(f"b{number}", prompt(1, first=500 + number))
    assert (await story.step()).granted["a"] == share


async def test_the_adaptive_threshold_limits_nothing_where_there_is_no_threshold() -> None:
    story = Story(max_num_batched_tokens=24, long_prefill_token_threshold_adaptive=True)
    story.add("a", prompt(40))
    story.add("b", prompt(4, first=500))
    assert (await story.step()).granted == {"a": 24}


async def test_nothing_to_do_is_an_empty_plan() -> None:
    story = Story()
    assert not story.scheduler.has_work
    told = await story.step()
    assert (told.granted, told.round_trips) == ({}, 0)
