"""Calls that can wait: how many of them a turn of the event loop makes."""

import asyncio

from services.gateway.adapters.http.turns import Turns


async def calls_of_each_turn(num_calls: int) -> list[int]:
    turns, called = Turns(), [0]

    def call() -> None:
        called[-1] += 1

    for _ in range(num_calls):
        turns.add(call)
    while sum(called) < num_calls:
        await asyncio.sleep(0)
        called.append(0)
    return called[:-1]


async def test_none_is_made_in_the_turn_in_which_it_is_added_though_it_is_alone() -> None:
    turns, called = Turns(), []
    turns.add(lambda: called.append("a"))
    assert not called
    await asyncio.sleep(0)
    assert called == ["a"]


async def test_four_are_made_in_a_turn() -> None:
    assert await calls_of_each_turn(10) == [4, 4, 2]


async def test_of_many_a_quarter_is_made_so_that_they_do_not_become_ever_more() -> None:
    assert await calls_of_each_turn(40) == [10, 7, 5, 4, 4, 4, 4, 2]


async def test_a_call_that_adds_another_leaves_it_to_a_later_turn() -> None:
    turns, called = Turns(), []
    turns.add(lambda: (called.append("a"), turns.add(lambda: called.append("b"))))
    await asyncio.sleep(0)
    assert called == ["a"]
    await asyncio.sleep(0)
    assert called == ["a", "b"]
