"""How many deferred calls run in one iteration of the event loop."""

import asyncio

from services.gateway.adapters.http.transport.connections import DeferredCalls


class Processor:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def calls_of_each_turn(
    num_calls: int, *, seconds_each: float, seconds_between: float
) -> list[int]:
    processor, called = Processor(), [0]
    turns = DeferredCalls(processor)

    def call() -> None:
        processor.seconds += seconds_each
        called[-1] += 1

    for _ in range(num_calls):
        turns.add(call)
    while sum(called) < num_calls:
        processor.seconds += seconds_between
        await asyncio.sleep(0)
        called.append(0)
    return called[:-1]


async def test_none_is_made_in_the_turn_in_which_it_is_added_though_it_is_alone() -> None:
    turns, called = DeferredCalls(), []
    turns.add(lambda: called.append("a"))
    assert not called
    await asyncio.sleep(0)
    assert called == ["a"]


async def test_one_is_made_in_a_turn_however_many_wait() -> None:
    made = await calls_of_each_turn(100, seconds_each=0.25, seconds_between=0.0)
    assert made == [1] * 100


async def test_where_turns_are_long_calls_take_half_of_the_time_that_the_rest_takes() -> None:
    """Each call takes 0.25 s, and an iteration 1 s without calls. So two calls run in each."""
    made = await calls_of_each_turn(7, seconds_each=0.25, seconds_between=1.0)
    assert made == [2, 2, 2, 1]


async def test_time_without_waiting_calls_does_not_count() -> None:
    processor, called = Processor(), []
    turns = DeferredCalls(processor)
    turns.add(lambda: called.append("a"))
    await asyncio.sleep(0)
    processor.seconds += 10.0
    turns.add(lambda: called.append("b"))
    turns.add(lambda: called.append("c"))
    await asyncio.sleep(0)
    assert called == ["a", "b"]


async def test_a_call_that_adds_another_leaves_it_to_a_later_turn() -> None:
    turns, called = DeferredCalls(), []
    turns.add(lambda: (called.append("a"), turns.add(lambda: called.append("b"))))
    await asyncio.sleep(0)
    assert called == ["a"]
    await asyncio.sleep(0)
    assert called == ["a", "b"]
