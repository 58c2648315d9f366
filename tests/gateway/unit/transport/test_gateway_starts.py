"""The order in which simultaneous requests start."""

import asyncio

from services.gateway.adapters.http.transport.connections import Starts


async def started(*clients: bytes) -> list[list[str]]:
    """The names of the requests that start in each iteration of the event loop. A name consists of
    the client and the number of the request among the client's requests.
    """
    starts, turns, numbers = Starts(), [[]], dict.fromkeys(clients, 0)
    for client in clients:
        name = f"{client.decode()}{numbers[client]}"
        numbers[client] += 1
        starts.add(client, lambda name=name: turns[-1].append(name))
    while sum(map(len, turns)) < len(clients):
        turns.append([])
        await asyncio.sleep(0)
    return turns


async def test_requests_of_one_client_start_in_their_order_four_in_a_turn() -> None:
    assert await started(*[b"a"] * 6) == [["a0", "a1", "a2", "a3"], ["a4", "a5"]]


async def test_clients_take_turns_in_being_started() -> None:
    turns = await started(*[b"a"] * 6, b"b", b"c", b"b")
    assert turns == [["a0", "a1", "a2", "a3"], ["a4", "b0", "c0", "a5"], ["b1"]]


async def test_a_request_that_comes_alone_starts_at_once() -> None:
    starts, names = Starts(), []
    starts.add(b"a", lambda: names.append("a"))
    assert names == ["a"]


async def test_those_that_come_while_others_wait_start_after_them() -> None:
    starts, names = Starts(), []
    for number in range(6):
        starts.add(b"a", lambda number=number: names.append(number))
    await asyncio.sleep(0)
    assert names == [0, 1, 2, 3, 4, 5]
    for number in range(6, 10):
        starts.add(b"a", lambda number=number: names.append(number))
    assert names == [0, 1, 2, 3, 4, 5, 6, 7], "two of this turn had waited"
    await asyncio.sleep(0)
    assert names == list(range(10))


async def test_a_request_that_comes_later_starts_too() -> None:
    starts, names = Starts(), []
    for name in ("a", "b"):
        starts.add(b"", lambda name=name: names.append(name))
        await asyncio.sleep(0)
    assert names == ["a", "b"]
