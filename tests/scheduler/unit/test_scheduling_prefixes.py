"""Prefix hits: how long they are, and which blocks requests share."""

from tests.scheduler.paged_model import continuation
from tests.scheduler.story import Story, prompt


async def test_a_second_prompt_finds_the_blocks_of_the_first() -> None:
    story = Story()
    story.add("a", prompt(10))
    assert (await story.step()).blocks == {"a": [1, 2, 3]}
    late = story.add("b", [*prompt(8), 1, 2, 3])
    told = await story.step()
    assert told.blocks["b"] == [1, 2, 4]
    assert (told.start["b"], told.granted["b"]) == (8, 3)
    assert late.num_cached_tokens == 8


async def test_a_hit_leaves_one_token_to_sample_from() -> None:
    story = Story()
    first = story.add("a", prompt(8), max_tokens=1)
    await story.run()
    again = story.add("b", prompt(8), max_tokens=1)
    told = await story.step()
    assert (told.start["b"], told.granted["b"]) == (4, 4), "7 of 8 tokens: one whole block"
    assert again.num_cached_tokens == 4
    assert again.token_ids == first.token_ids


async def test_only_full_blocks_are_found() -> None:
    story = Story()
    story.add("a", prompt(7), max_tokens=1)
    await story.run()
    story.add("b", prompt(11))
    assert (await story.step()).start["b"] == 4


async def test_a_burst_shares_within_one_step_and_one_admission() -> None:
    story = Story()
    shared = prompt(8)
    for number in range(5):
        story.add(f"r{number}", [*shared, 500 + number, 600 + number])
    told = await story.step()
    assert told.granted == {"r0": 10, "r1": 2, "r2": 2, "r3": 2, "r4": 2}
    assert [told.blocks[f"r{number}"][:2] for number in range(5)] == [[1, 2]] * 5
    assert [told.blocks[f"r{number}"][2] for number in range(5)] == [3, 4, 5, 6, 7]
    assert told.round_trips == 2, "one look-up, one admission"


async def test_a_burst_shares_only_what_the_budget_lets_the_first_compute() -> None:
    story = Story(max_num_batched_tokens=6)
    story.add("a", prompt(10))
    story.add("b", prompt(10))
    first, second = await story.steps(2)
    assert first.granted == {"a": 6}
    assert (second.granted, second.start["b"]) == ({"a": 4, "b": 2}, 8), "a fills them this step"


async def test_output_is_cached_like_a_prompt() -> None:
    story = Story()
    first = story.add("a", prompt(4), max_tokens=6)
    await story.run()
    story.add("b", [*first.token_ids, 7])
    assert (await story.step()).start["b"] == 8


async def test_the_last_sampled_token_is_not_computed_and_not_published() -> None:
    story = Story()
    first = story.add("a", prompt(4), max_tokens=4)
    await story.run()
    assert len(first.token_ids) == 8
    story.add("b", [*first.token_ids, 7])
    assert (await story.step()).start["b"] == 4


async def test_salts_keep_requests_apart() -> None:
    story = Story()
    story.add("a", prompt(9), cache_salt="one", max_tokens=1)
    story.add("b", prompt(9), cache_salt="two", max_tokens=1)
    story.add("c", prompt(9), cache_salt="one", max_tokens=1)
    told = await story.step()
    assert told.start == {"a": 0, "b": 0, "c": 8}


async def test_without_caching_nothing_is_found() -> None:
    story = Story(enable_prefix_caching=False)
    story.add("a", prompt(9))
    story.add("b", prompt(9))
    told = await story.step()
    assert told.start == {"a": 0, "b": 0}
    assert told.round_trips == 1, "no look-up"
    assert story.pool.core.num_cached_hashes == 0


async def test_a_request_that_wants_every_position_reads_no_cache() -> None:
    story = Story()
    story.add("a", prompt(9), max_tokens=1)
    await story.run()
    request = story.add("b", prompt(9), reads_prefix_cache=False)
    assert (await story.step()).start["b"] == 0
    assert request.num_cached_tokens == 0


async def test_least_recently_used_blocks_are_evicted() -> None:
    story = Story(num_blocks=5)
    story.add("a", prompt(8), max_tokens=1)
    await story.run()
    story.add("b", prompt(8, first=500), max_tokens=1)
    await story.run()
    story.add("c", prompt(4, first=700), max_tokens=1)
    await story.run()
    assert story.pool.core.stats().num_evictions == 1
    story.add("a again", prompt(9), max_tokens=1)
    story.add("b again", prompt(9, first=500), max_tokens=1)
    told = await story.run()
    assert told[0].start == {"a again": 4}, "its tail went first"


async def test_reset_forgets_every_prefix_unless_blocks_are_in_use() -> None:
    story = Story()
    story.add("a", prompt(8), max_tokens=2)
    await story.step()
    assert not await story.scheduler.reset_prefix_cache()
    await story.run()
    assert await story.scheduler.reset_prefix_cache()
    story.add("b", prompt(9), max_tokens=1)
    assert (await story.step()).start["b"] == 0


async def test_a_request_goes_on_after_output_it_already_has() -> None:
    story = Story()
    known = continuation(prompt(6), 3)
    request = story.add("a", prompt(6) + known, num_prompt_tokens=6, max_tokens=5)
    await story.run()
    assert request.token_ids == prompt(6) + continuation(prompt(6), 5)
