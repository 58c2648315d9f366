"""Preemption: which request is preempted when a running one needs a block and none is free."""

from tests.scheduler.paged_model import continuation
from tests.scheduler.story import Story, prompt


async def test_fcfs_preempts_the_last_and_it_comes_back_first() -> None:
    story = Story(num_blocks=5)
    story.add("a", prompt(7), max_tokens=6)
    story.add("b", prompt(7, first=500), max_tokens=6)
    story.add("c", prompt(1, first=700), max_tokens=6)
    first, second = await story.steps(2)
    assert (first.new, story.waiting) == (["a", "b"], ["c"])
    assert first.blocks == {"a": [1, 2], "b": [3, 4]}
    assert second.granted == {"a": 1, "b": 1}
    third = await story.step()
    assert (third.preempted, third.granted, third.blocks) == (["b"], {"a": 1}, {"a": [4]})
    assert story.waiting == ["b", "c"], "a victim is the head of the queue"
    assert (third.new, third.resumed) == ([], []), "no request is admitted in a step that preempts"


async def test_a_victim_is_computed_again_and_gives_the_same_tokens() -> None:
    story = Story(num_blocks=6)
    a = story.add("a", prompt(7), max_tokens=8)
    b = story.add("b", prompt(7, first=500), max_tokens=8)
    told = await story.run()
    assert b.num_preemptions == story.scheduler.num_preemptions > 0
    assert [name for step in told for name in step.resumed] == ["b"] * b.num_preemptions
    assert a.token_ids == prompt(7) + continuation(prompt(7), 8)
    assert b.token_ids == prompt(7, first=500) + continuation(prompt(7, first=500), 8)
    assert story.pool.core.num_free_blocks == 5


async def test_a_victim_finds_its_own_blocks_if_they_were_not_reused() -> None:
    story = Story(num_blocks=7)
    story.add("a", prompt(7), max_tokens=3)
    b = story.add("b", prompt(11, first=500), max_tokens=3)
    told = await story.run()
    assert b.num_preemptions == 1
    back = next(step for step in told if step.resumed)
    assert (back.start["b"], back.granted["b"]) == (12, 1)
    assert b.num_cached_tokens == 0, "what it found when it was first scheduled"
    stats = story.pool.core.stats()
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (6 + 10, 0), "each prompt once"


async def test_a_request_that_does_not_fit_and_is_the_last_is_the_victim_itself() -> None:
    story = Story(num_blocks=4)
    story.add("a", prompt(6))
    story.add("b", prompt(4, first=500))
    await story.step()
    told = await story.step()
    assert (told.preempted, told.granted) == (["b"], {"a": 1})


async def test_priority_preempts_the_least_important_and_rolls_its_grant_back() -> None:
    story = Story(num_blocks=5, policy="priority", max_num_batched_tokens=16)
    story.add("low", prompt(7), priority=5)
    await story.step()
    story.add("high", prompt(8, first=500), priority=0)
    await story.step()
    assert story.running == ["low", "high"]
    told = await story.step()
    assert (told.preempted, told.granted) == (["low"], {"high": 1})
    assert story.waiting == ["low"]


async def test_the_budget_of_a_rolled_back_grant_goes_to_the_requests_behind() -> None:
    """As in vLLM, the number of tokens for "high" is set before its slots are allocated. Then the
    allocation preempts "low", whose tokens return to the budget for later requests.
    """
    story = Story(
        num_blocks=8, policy="priority", max_num_batched_tokens=8, scheduler_reserve_full_isl=False
    )
    story.add("low", prompt(20), priority=9)
    await story.step()
    story.add("high", prompt(12, first=500), priority=0)
    assert (await story.step()).granted == {"low": 8}
    third = await story.step()
    assert third.granted == {"low": 4, "high": 4}
    fourth = await story.step()
    assert fourth.preempted == ["low"]
    assert fourth.granted == {"high": 7}, "the rest of the budget when low had a grant before it"


async def test_a_victim_leaves_no_hash_of_a_block_that_was_never_computed() -> None:
    """vLLM leaves the hash: it publishes a step's blocks before it has scheduled the whole step."""
    story = Story(
        num_blocks=9, policy="priority", max_num_batched_tokens=12, long_prefill_token_threshold=8
    )
    low = story.add("low", prompt(25), priority=9, max_tokens=2)
    await story.step()
    story.add("high", prompt(4, first=500), priority=0, max_tokens=2)
    assert (await story.step()).granted == {"low": 8, "high": 4}
    third, fourth = await story.steps(2)
    assert (third.preempted, third.granted) == (["low"], {"high": 1})
    assert fourth.start == {"low": 20}, "the sixth block would have been filled by the third step"
    await story.run()
    assert low.token_ids == prompt(25) + continuation(prompt(25), 2)


async def test_among_equal_priorities_the_latest_arrival_goes() -> None:
    story = Story(num_blocks=7, policy="priority")
    story.add("early", prompt(8), priority=1, arrival_time=1.0)
    story.add("late", prompt(8, first=300), priority=1, arrival_time=3.0)
    story.add("middle", prompt(8, first=500), priority=1, arrival_time=2.0)
    await story.step()
    assert (await story.step()).preempted == ["late"]


async def test_priority_admits_by_priority_then_arrival_then_name() -> None:
    story = Story(policy="priority", max_num_seqs=1)
    for name, priority, arrival in (("d", 2, 0.0), ("b", 1, 5.0), ("a", 1, 5.0), ("c", 1, 1.0)):
        story.add(name, prompt(4), priority=priority, arrival_time=arrival, max_tokens=1)
    assert story.waiting == ["c", "a", "b", "d"]
    assert [step.new for step in await story.steps(4)] == [["c"], ["a"], ["b"], ["d"]]


async def test_fcfs_ignores_priority() -> None:
    story = Story(max_num_seqs=1)
    story.add("a", prompt(4), priority=9, max_tokens=1)
    story.add("b", prompt(4), priority=0, max_tokens=1)
    assert [step.new for step in await story.steps(2)] == [["a"], ["b"]]


async def test_only_a_request_that_fits_up_to_its_present_end_is_admitted() -> None:
    story = Story(num_blocks=7, max_num_batched_tokens=8)
    story.add("a", prompt(8))
    await story.step()
    story.add("b", prompt(20, first=500))
    assert (await story.step()).new == [], "5 blocks for b, 3 free"


async def test_without_that_reserve_the_first_chunk_is_enough() -> None:
    story = Story(num_blocks=7, max_num_batched_tokens=8, scheduler_reserve_full_isl=False)
    story.add("a", prompt(8))
    await story.step()
    story.add("b", prompt(20, first=500))
    told = await story.step()
    assert (told.new, told.granted["b"]) == (["b"], 7)


async def test_the_watermark_keeps_blocks_free_for_running_requests() -> None:
    story = Story(num_blocks=10, watermark=0.2)
    story.add("a", prompt(12))
    story.add("b", prompt(16, first=300))
    story.add("c", prompt(8, first=500), max_tokens=1)
    told = await story.step()
    assert told.new == ["a", "b"], "3 + 4 of 9 blocks; two stay free"
    assert (await story.step()).new == []


async def test_the_watermark_does_not_stop_a_request_that_is_alone() -> None:
    story = Story(num_blocks=10, watermark=0.5)
    story.add("a", prompt(36))
    assert (await story.step()).new == ["a"]


async def test_preempt_all_keeps_the_order() -> None:
    story = Story()
    for name, first in (("a", 100), ("b", 300), ("c", 500)):
        story.add(name, prompt(5, first), max_tokens=4)
    await story.step()
    story.add("d", prompt(5, 700), max_tokens=4)
    assert len(story.scheduler.preempt_all()) == 3
    assert (story.running, story.waiting) == ([], ["a", "b", "c", "d"])
    told = await story.step()
    assert (told.resumed, told.new) == (["a", "b", "c"], ["d"])
    assert told.start == {"a": 4, "b": 4, "c": 4, "d": 0}


async def test_the_pool_is_forgotten_for_requests_that_are_held_back() -> None:
    """Otherwise, blocks would be published under the hashes of other blocks."""
    story = Story(num_blocks=12)
    first = story.add("first", prompt(30))
    second = story.add("second", prompt(24, 500), max_tokens=12)
    await story.step()
    assert (story.running, second.known_to_pool) == (["first"], True)
    story.scheduler.preempt_all()
    story.scheduler.admit_only([first])
    story.lose()
    story.scheduler.admit_only(None)
    story.scheduler.abort(first)
    await story.run()
    third = story.add("third", second.token_ids[:33], max_tokens=1)
    await story.run()
    assert third.num_cached_tokens == 32


async def test_forgetting_the_pool_costs_computation_and_no_token() -> None:
    story = Story(num_blocks=20)
    a = story.add("a", prompt(9), max_tokens=6)
    b = story.add("b", prompt(9), max_tokens=6)
    await story.steps(3)
    c = story.add("c", prompt(9, 500), max_tokens=6)
    victims = story.scheduler.forget_pool()
    assert [request.request_id for request in victims] == ["b", "a"]
    fresh = Story(num_blocks=20)
    story.pool.core, story.model = fresh.pool.core, fresh.model
    told = await story.step()
    assert told.start == {"a": 0, "b": 8, "c": 0}
    await story.run()
    for request in (a, b, c):
        given = request.token_ids[:9]
        assert request.token_ids == given + continuation(given, 6)
