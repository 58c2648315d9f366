"""Multimodal items of prompts, such as images: chunks that end because of an item, and requests
that share encoder outputs.
"""

from typing import Any

import pytest

from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.common.request.encoder_input import EncoderInput
from services.common.request.finish import FinishReason
from services.scheduler.core.output import SchedulerOutput, WaitReason
from services.scheduler.core.planning.encoder_cache_manager import EncoderCacheManager
from services.scheduler.core.request import Request
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from tests.scheduler.story import Story, prompt


def item(identifier: str, offset: int, length: int, *embeds: int) -> EncoderInput:
    return EncoderInput(identifier, offset, length, embeds or None)


def make_story(**config: Any) -> Story:
    limits = {"encoder_compute_budget": 20, "encoder_cache_size": 20}
    return Story(**limits | config)


def add(story: Story, name: str, *items: EncoderInput, length: int = 20, **fields: Any) -> Request:
    return story.add(name, prompt(length), encoder_inputs=items, **fields)


async def step(story: Story) -> SchedulerOutput:
    plan = await story.scheduler.schedule()
    story.take_in(plan, story.model.run_plan(plan))
    story.pool.core.check()
    return plan


def encoded(plan: SchedulerOutput) -> dict[str, list[int]]:
    return {request.request_id: inputs for request, inputs in plan.encoder_inputs.items()}


def granted(plan: SchedulerOutput) -> dict[str, int]:
    ids = [request.request_id for request in plan.requests]
    return dict(zip(ids, plan.num_scheduled_tokens, strict=True))


async def test_a_chunk_ends_before_an_item_for_which_there_is_no_budget() -> None:
    story = make_story(encoder_compute_budget=6)
    add(story, "a", item("cat", 2, 5), item("dog", 10, 6))
    first, second = await step(story), await step(story)
    assert (granted(first), encoded(first)) == ({"a": 10}, {"a": [0]})
    assert (granted(second), encoded(second)) == ({"a": 10}, {"a": [1]})


async def test_an_item_is_computed_with_the_first_chunk_that_touches_it() -> None:
    story = make_story(max_num_batched_tokens=8)
    add(story, "a", item("cat", 4, 10))
    plans = [await step(story) for _ in range(3)]
    assert list(map(encoded, plans)) == [{"a": [0]}, {}, {}]
    assert story.scheduler.encoder_cache.unused == ["cat"]


async def test_items_are_not_split_where_that_is_not_wanted() -> None:
    story = make_story(max_num_batched_tokens=8, disable_chunked_mm_input=True)
    add(story, "a", item("cat", 4, 6))
    plans = [await step(story) for _ in range(3)]
    assert list(map(granted, plans)) == [{"a": 4}, {"a": 8}, {"a": 8}]
    assert list(map(encoded, plans)) == [{}, {"a": [0]}, {}]


async def test_two_requests_share_what_was_made_of_one_item() -> None:
    story = make_story(enable_prefix_caching=False)
    add(story, "a", item("cat", 2, 5))
    add(story, "b", item("cat", 8, 5))
    assert encoded(await step(story)) == {"a": [0]}
    assert story.scheduler.encoder_cache.num_free == 15


async def test_who_goes_on_at_an_item_without_room_is_overtaken() -> None:
    story = make_story(encoder_cache_size=5)
    add(story, "a", item("cat", 0, 5))
    blocked = story.add("b", prompt(8, 500), encoder_inputs=(item("dog", 0, 5),))
    story.add("c", prompt(8, 600))
    plan = await step(story)
    assert granted(plan) == {"a": 20, "c": 8}
    assert plan.passed_over == {blocked: WaitReason.ENCODER}
    plan = await step(story)
    assert (encoded(plan), plan.evicted_encoder_inputs) == ({"b": [0]}, ["cat"])


async def test_one_name_for_two_sizes_ends_the_later_request() -> None:
    story = make_story()
    first = add(story, "a", item("cat", 2, 5))
    second = add(story, "b", item("cat", 12, 6))
    await step(story)
    assert first.finish_reason is None
    assert second.finish_reason is FinishReason.ERROR
    assert (
        second.error
        == "the multimodal item 'cat' has another size than the cached item with the same "
        "identifier"
    )


async def test_a_running_request_that_names_another_size_ends_too() -> None:
    story = make_story(max_num_batched_tokens=12)
    request = add(story, "a", item("cat", 2, 5), item("cat", 14, 6))
    await step(story)
    await step(story)
    assert request.finish_reason is FinishReason.ERROR
    assert not story.scheduler.running
    assert not story.scheduler.encoder_cache.used
    await story.run()
    story.pool.core.check()


async def test_a_preempted_request_gives_its_items_up_and_they_stay_cached() -> None:
    story = make_story(num_blocks=8, max_num_batched_tokens=12, scheduler_reserve_full_isl=False)
    add(story, "a", max_tokens=40)
    late = add(story, "b", item("cat", 2, 14), length=20)
    for _ in range(30):
        await step(story)
        if late.num_preemptions:
            break
    assert late.num_preemptions
    cache = story.scheduler.encoder_cache
    assert late not in cache.used_inputs
    assert cache.num_freeable == 20


async def test_placeholders_of_other_items_share_no_block() -> None:
    story = make_story()
    for identifier, offset, hit in (
        ("cat", 5, 0),
        ("cat", 5, 16),
        ("dog", 5, 4),
        ("cat", 6, 4),
        ("cat", 9, 4),
    ):
        request = add(story, "a", item(identifier, offset, 5), max_tokens=1)
        await story.run()
        assert request.num_cached_tokens == hit


async def test_a_log_tells_items_and_what_is_evicted() -> None:
    story = make_story(encoder_cache_size=6)
    entries: list[Entry] = []
    story.scheduler = RecordingScheduler(story.config, story.pool, entries.append)
    add(story, "a", item("cat", 2, 6, 1, 3))
    add(story, "b", item("dog", 1, 6))
    await step(story)
    await step(story)
    story.scheduler.reset_encoder_cache()
    assert entries[0]["encoder_inputs"] == [["cat", 2, 6, [1, 3]]]
    assert entries[2]["encoder_inputs"] == {"1": [0]}
    assert entries[4]["evicted_encoder_inputs"] == ["cat"]
    replay = LogReplay(Header("stand-in", story.config))
    for entry in entries:
        assert await replay.replay_entry(Field(entry)) == []
    assert replay.scheduler.encoder_cache.num_free == 6
    for wrong in (["cat", 2, 6], ["cat", 20, 1, None], ["cat", 18, 3, None], ["cat", 1, 2, [2]]):
        with pytest.raises(ValueError, match="encoder_inputs"):
            await LogReplay(Header("stand-in", story.config)).replay_entry(
                Field(entries[0] | {"encoder_inputs": [wrong]})
            )


# The encoder cache without a scheduler


def make_request(name: str, *items: EncoderInput) -> Request:
    story = make_story()
    return add(story, name, *items)


def test_unused_outputs_are_evicted_oldest_first_and_only_if_that_is_enough() -> None:
    cache = EncoderCacheManager(10)
    request = make_request("a", item("cat", 0, 4), item("dog", 4, 4), item("cow", 8, 6))
    for index in (0, 1):
        assert cache.make_room(4)
        cache.allocate(request, index)
    assert not cache.make_room(6)
    cache.free_computed(request, 5)
    assert (cache.unused, list(cache.used)) == (["cat"], ["dog"])
    assert cache.make_room(6)
    assert (cache.num_free, cache.take_evicted()) == (6, ["cat"])
    assert not cache.make_room(7)
    assert cache.take_evicted() == []


def test_an_item_that_a_prompt_has_twice_is_used_until_the_second_is_computed() -> None:
    cache = EncoderCacheManager(10)
    request = make_request("a", item("cat", 0, 4), item("cat", 10, 4))
    assert cache.make_room(4)
    cache.allocate(request, 0)
    assert cache.use_cached(request, 1)
    cache.free_computed(request, 10)
    assert cache.unused == []
    cache.free_computed(request, 14)
    assert cache.unused == ["cat"]


def test_what_is_computed_again_is_not_forgotten_by_the_workers() -> None:
    cache = EncoderCacheManager(4)
    request = make_request("a", item("cat", 0, 4))
    cache.make_room(4)
    cache.allocate(request, 0)
    cache.free(request)
    cache.make_room(4)
    cache.allocate(request, 0)
    assert cache.take_evicted() == []
