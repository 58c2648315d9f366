"""Loads of KV blocks that fail within a step, while other requests share the blocks or requests are
aborted.

`elsewhere(n, fail_blocks=[i])` is a prompt whose first n tokens are in external storage, from which
loads of the block with index i fail. A block has four tokens.
"""

from tests.scheduler.options.transfers.test_scheduling_connector import elsewhere, request, story


async def test_an_aborted_request_leaves_no_hash_of_a_block_that_was_not_loaded() -> None:
    """The first request is aborted while the step that loads its blocks is in flight."""
    steps = await story(
        (0, request("other", 5, first=300) | {"max_tokens": 8}),
        (0, request("a", 13, **elsewhere(12, fail_blocks=[1]))),
        (3, request("b", 13)),
        aborts=((1, "a"),),
        async_scheduling=True,
    )
    assert (steps[1]["aborted"], steps[3]["cached"]) == (["a"], {"b": 4})


async def test_an_aborted_request_leaves_no_hash_of_a_block_after_one_that_was_not_loaded() -> None:
    """In the step of the load, a second request hits its blocks and computes the next block."""
    steps = await story(
        (0, request("other", 5, first=300) | {"max_tokens": 8}),
        (0, request("a", 9, **elsewhere(8, fail_blocks=[1]))),
        (0, request("b", 13)),
        (3, request("c", 13)),
        aborts=((1, "a"), (1, "b")),
        async_scheduling=True,
    )
    assert steps[0]["start"] == [0, 8, 8]
    assert steps[3]["cached"] == {"c": 4}


async def test_who_shares_a_block_that_was_not_loaded_computes_it_if_the_first_one_ends() -> None:
    """The first request computes the block itself, two tokens in each step, until it is aborted."""
    steps = await story(
        (0, request("a", 9, **elsewhere(8, fail_blocks=[1], times=1))),
        (0, request("b", 13)),
        aborts=((2, "a"),),
        long_prefill_token_threshold=2,
    )
    assert (steps[0]["start"], steps[1]["start"]) == ([8, 8], [4, 8])
    assert (steps[2]["scheduled"], steps[2]["start"]) == ([["b", 5]], [8])
    assert (steps[3]["scheduled"], steps[3]["start"]) == ([["b", 9]], [4])


async def test_tokens_computed_from_a_block_before_it_was_loaded_again_are_dropped() -> None:
    """The second request repeats the last token of its prompt until the first request has computed
    the block that the two share.
    """
    steps = await story(
        (0, request("a", 10, **elsewhere(8, fail_blocks=[1], times=1))),
        (0, request("b", 9)),
        long_prefill_token_threshold=2,
    )
    assert [step["start"] for step in steps[:4]] == [[8, 8], [4, 8], [6, 8], [8, 9]]
    assert [step["outputs"] for step in steps[:2] if step.get("outputs")] == []
    assert [name for name, *_ in steps[2]["outputs"]] == ["b"]


async def test_who_hits_a_block_before_it_was_loaded_again_repeats_its_step() -> None:
    steps = await story(
        (0, request("a", 9, **elsewhere(8, fail_blocks=[0], times=1))),
        (1, request("b", 9)),
        long_prefill_token_threshold=2,
    )
    starts = [
        dict(zip((name for name, _ in step["scheduled"]), step["start"], strict=True))
        for step in steps[:5]
    ]
    assert [start.get("a") for start in starts] == [8, 0, 2, 4, 6]
    assert [start.get("b") for start in starts[1:]] == [8, 8, 8, 8]
    assert next(step["step"] for step in steps if step.get("outputs")) == 4
