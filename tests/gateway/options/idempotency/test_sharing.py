"""Gateways with a common journal return the same answer for an idempotency key, even if one dies,
stalls or loses the journal.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from services.common.errors import StepwellError, Unavailable
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.options.idempotency.core.journal import News, Position
from services.gateway.options.idempotency.core.key import KeyReused
from services.gateway.options.idempotency.core.log_view import LogView
from tests.gateway.options.idempotency.keyed_world import (
    LIMITS,
    TIMES,
    Client,
    KeyedGateway,
    settle,
    token_at,
)
from tests.gateway.options.idempotency.memory_journal import MemoryJournal, SharedLogs
from tests.waiting import until


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> HfTokenizer:
    return load_tokenizer(model)


@dataclass
class World:
    """Gateways "a" and "b". Their journals share the same logs."""

    logs: SharedLogs
    journals: list[MemoryJournal]
    gateways: list[KeyedGateway]

    @property
    def num_started(self) -> int:
        return sum(len(gateway.engine.started) for gateway in self.gateways)

    def log(self) -> list[tuple[Position, bytes]]:
        (entries,) = self.logs.logs.values()
        return entries

    @property
    def num_logged(self) -> int:
        view = LogView()
        view.apply(self.log())
        return view.recording.num_tokens

    def expected(self, num_tokens: int = 6) -> list[list[int]]:
        """The expected output, for each sequence, of the first request that an engine started."""
        requests = next(g.engine.started[0][0] for g in self.gateways if g.engine.started)
        return [[token_at(one, position) for position in range(num_tokens)] for one in requests]


@pytest.fixture
async def world(tokenizer: HfTokenizer) -> AsyncIterator[World]:
    loop = asyncio.get_running_loop()
    logs = SharedLogs(loop.time, TIMES.lease_seconds)
    journals = [MemoryJournal(logs), MemoryJournal(logs)]
    gateways = [
        KeyedGateway(tokenizer, loop, journal, name=name)
        for name, journal in zip("ab", journals, strict=True)
    ]
    yield World(logs, journals, gateways)
    for gateway in gateways:
        await gateway.keyed.close(Unavailable("the test is over"))
        await gateway.stop()


async def begun(gateway: KeyedGateway, num_tokens: int = 2, **ask) -> Client:
    client = gateway.ask(**ask)
    await until(lambda: gateway.engine.open)
    gateway.engine.step(num_tokens)
    await until(lambda: client.num_tokens == num_tokens * len(client.answers))
    return client


async def test_an_answer_has_the_length_for_which_its_request_was_checked(tokenizer: HfTokenizer):
    class SlowJournal(MemoryJournal):
        async def open(self, scope: str) -> tuple[bool, News]:
            gateway.engine.capacity = 4  # a replica with a smaller pool joined during the call
            return await super().open(scope)

    loop = asyncio.get_running_loop()
    gateway = KeyedGateway(tokenizer, loop, SlowJournal(SharedLogs(loop.time)))
    client = gateway.ask(prompts=([5] * 10,), max_tokens=None)
    await until(lambda: gateway.engine.started)
    [([request], _)] = gateway.engine.started
    assert request.sampling.max_tokens == 990
    await client.leave()
    await gateway.keyed.close(Unavailable("the test is over"))
    await gateway.stop()


async def test_an_answer_is_followed_at_another_gateway(world: World):
    a, b = world.gateways
    first = await begun(a, temperature=1.0)
    second = b.ask(temperature=1.0)
    await until(lambda: second.num_tokens == 2)
    a.engine.step(1)
    await until(lambda: second.num_tokens == 3)
    a.engine.step(3)
    assert await second.result() == await first.result() == world.expected()
    assert (second.request_id, second.created) == (first.request_id, first.created)
    assert second.is_replay
    third = b.ask(temperature=1.0)
    assert await third.result() == world.expected()
    assert world.num_started == 1
    assert (b.keyed.counts.followed, b.keyed.counts.attached) == (1, 1)


async def test_a_complete_answer_is_found_at_another_gateway(world: World):
    a, b = world.gateways
    first = await begun(a, 6, n=2, prompts=([5, 6], [7]), logprobs=0)
    tokens = await first.result()
    second = b.ask(n=2, prompts=([5, 6], [7]), logprobs=0)
    assert await second.result() == tokens
    assert [one.logprobs for one in second.answers] == [one.logprobs for one in first.answers]
    assert world.num_started == 1


async def test_a_killed_gateways_answer_goes_on_at_another(world: World):
    a, b = world.gateways
    first = await begun(a, temperature=1.0, logprobs=0)
    await until(lambda: world.num_logged == 2)
    await a.stop()
    second = b.ask(temperature=1.0, logprobs=0)
    await until(lambda: second.num_tokens == 2)
    await until(lambda: b.engine.open)
    b.engine.step(4)
    assert await second.result() == world.expected()
    (sequence,) = second.answers
    assert sequence.logprobs is not None
    assert list(sequence.logprobs.ranks) == [1, 2, 3, 4, 5, 6]
    assert (second.request_id, second.created) == (first.request_id, first.created)
    (before, _), (after, [progress]) = a.engine.started[0], b.engine.started[0]
    assert after[0].sampling == before[0].sampling
    assert len(progress.token_ids) == 2
    assert b.keyed.counts.resumed == 1


async def test_two_that_ask_at_once_are_computed_once(world: World):
    a, b = world.gateways
    clients = [gateway.ask(temperature=1.0) for _ in range(5) for gateway in (a, b)]
    await until(lambda: all(client.request_id for client in clients))
    await until(lambda: a.engine.open or b.engine.open)
    for gateway in (a, b):
        gateway.engine.step(6)
    answers = [await client.result() for client in clients]
    assert answers == [world.expected()] * 10
    assert world.num_started == 1
    assert len({client.request_id for client in clients}) == 1


async def test_an_owner_that_stalled_is_fenced_and_its_clients_are_served(world: World):
    a, b = world.gateways
    first = await begun(a, temperature=1.0)
    await until(lambda: world.num_logged == 2)
    world.journals[0].is_down = True  # gateway a cannot renew its lease
    second = b.ask(temperature=1.0)
    await until(lambda: b.engine.open)
    b.engine.step(1)
    await until(lambda: second.num_tokens == 3)
    world.journals[0].is_down = False
    a.engine.step(4)
    assert await first.result() == world.expected()
    await until(lambda: a.sharing.counts.fenced == 1)
    entries = len(world.log())
    b.engine.step(3)
    assert await second.result() == world.expected()
    await until(lambda: len(world.log()) > entries)
    assert {position.fence for position, _ in world.log()[entries:]} == {2}


async def test_a_fenced_owner_without_clients_stops(world: World):
    a, b = world.gateways
    first = await begun(a)
    world.journals[0].is_down = True
    await first.leave()
    second = b.ask()
    await until(lambda: b.engine.open)
    world.journals[0].is_down = False
    await until(lambda: a.sharing.counts.fenced == 1)
    await until(lambda: a.engine.open == [])
    b.engine.step(6)
    assert await second.result() == world.expected()
    third = a.ask()
    assert await third.result() == world.expected()


async def test_an_entry_that_was_written_although_the_call_failed_is_written_once(world: World):
    a, b = world.gateways
    first = await begun(a)
    world.journals[0].loses_answers = True
    a.engine.step(2)
    await until(lambda: not a.sharing.is_reachable)
    await asyncio.sleep(0.1)
    world.journals[0].loses_answers = False
    a.engine.step(2)
    await first.result()
    second = b.ask()
    assert await second.result() == world.expected()
    assert a.sharing.counts.fenced == 0
    assert world.num_started == 1


async def test_without_the_journal_an_answer_stays_at_its_gateway_until_it_is_back(world: World):
    a, b = world.gateways
    for journal in world.journals:
        journal.is_down = True
    first = await begun(a)
    assert a.sharing.counts.alone == 1
    again = a.ask()
    await until(lambda: again.num_tokens == 2)
    for journal in world.journals:
        journal.is_down = False
    await until(lambda: a.sharing.is_reachable and world.logs.logs)
    second = b.ask()
    await until(lambda: second.num_tokens == 2)
    a.engine.step(4)
    for client in (first, again, second):
        assert await client.result() == world.expected()
    assert world.num_started == 1


async def test_a_log_that_was_lost_is_written_again(world: World):
    a, b = world.gateways
    first = await begun(a)
    await until(lambda: world.num_logged == 2)
    follower = b.ask()
    await until(lambda: follower.num_tokens == 2)
    world.logs.logs.clear()  # the logs are lost, but the leases remain
    a.engine.step(1)
    await until(lambda: a.sharing.counts.lost == 1)
    await until(lambda: follower.num_tokens == 3)
    a.engine.step(3)
    assert await first.result() == await follower.result() == world.expected()


async def test_a_follower_goes_on_alone_when_log_and_lease_are_gone(world: World):
    a, b = world.gateways
    await begun(a)
    follower = b.ask()
    await until(lambda: follower.num_tokens == 2)
    await a.stop()
    world.logs.logs.clear()
    world.logs.lease_ends.clear()
    await until(lambda: b.engine.open)
    b.engine.step(4)
    assert await follower.result() == world.expected()


async def test_a_follower_goes_on_alone_when_the_journal_is_away_for_long(world: World):
    a, b = world.gateways
    first = await begun(a)
    follower = b.ask()
    await until(lambda: follower.num_tokens == 2)
    world.journals[1].is_down = True
    await until(lambda: b.engine.open)
    a.engine.step(4)
    b.engine.step(4)
    assert await follower.result() == await first.result() == world.expected()


async def test_a_damaged_log_is_begun_anew(world: World):
    a, b = world.gateways
    first = await begun(a, 6)
    await first.result()
    await until(lambda: not any(map(world.logs.is_leased, world.logs.logs)))
    position, value = world.log()[1]
    world.log()[1] = position, value[:-1] + b"?"
    second = await begun(b, 6)
    await second.result()
    assert b.sharing.counts.damaged == 1
    assert second.request_id != first.request_id


async def test_a_follower_of_a_damaged_log_goes_on_alone(world: World):
    a, b = world.gateways
    first = await begun(a)
    await until(lambda: world.num_logged == 2)
    follower = b.ask()
    await until(lambda: follower.num_tokens == 2)
    fence = world.log()[-1][0].fence
    world.log().append((Position(fence, 10_000), b"nonsense"))
    await until(lambda: b.engine.open)
    a.engine.step(4)
    b.engine.step(4)
    assert await follower.result() == await first.result() == world.expected()
    assert b.sharing.counts.damaged == 1


async def test_an_error_reaches_followers_and_is_not_remembered_anywhere(world: World):
    a, b = world.gateways
    first = await begun(a)
    follower = b.ask()
    await until(lambda: follower.num_tokens == 2)
    a.engine.fail(Unavailable("no replica", reason="NO_REPLICA_READY", retry_after_seconds=2.0))
    for client in (first, follower):
        with pytest.raises(StepwellError) as caught:
            await client.result()
        assert type(caught.value) is Unavailable
        assert caught.value.error_reason == "NO_REPLICA_READY"
        assert caught.value.retry_after_seconds == 2.0
    retries = [a.ask(), b.ask()]
    await until(lambda: a.engine.open or b.engine.open)
    for gateway in (a, b):
        gateway.engine.step(6)
    first_tokens, second_tokens = [await client.result() for client in retries]
    assert first_tokens == second_tokens
    assert world.num_started == 2


async def test_another_request_under_a_key_is_refused_at_any_gateway(world: World):
    a, b = world.gateways
    await begun(a)
    with pytest.raises(KeyReused):
        await b.ask(max_tokens=7).result()
    assert len(b.keyed) == 0
    assert b.keyed.counts.refused == 1


async def test_a_gateway_that_stops_hands_its_answers_over(world: World):
    a, b = world.gateways
    first = await begun(a)
    loop = asyncio.get_running_loop()
    await a.keyed.close(Unavailable("the server is shutting down"))
    began = loop.time()
    with pytest.raises(Unavailable):
        await first.result()
    second = b.ask()
    await until(lambda: b.engine.open)
    assert loop.time() - began < TIMES.lease_seconds, "no gateway waits for the lease to end"
    assert second.num_tokens == 2
    b.engine.step(4)
    assert await second.result() == world.expected()


async def test_an_answer_that_stopped_here_is_taken_up_there_and_then_found_here(
    tokenizer: HfTokenizer,
):
    loop = asyncio.get_running_loop()
    logs = SharedLogs(loop.time, TIMES.lease_seconds)
    limits = replace(LIMITS, linger_seconds=0.0)
    a, b = (
        KeyedGateway(tokenizer, loop, MemoryJournal(logs), limits=limits, name=name)
        for name in "ab"
    )
    first = await begun(a)
    await first.leave()
    await until(lambda: not a.engine.open and not logs.lease_ends)
    second = b.ask()
    await until(lambda: b.engine.open)
    b.engine.step(2)
    await until(lambda: second.num_tokens == 4)
    third = a.ask()
    await until(lambda: third.num_tokens == 4)
    b.engine.step(2)
    assert await third.result() == await second.result()
    assert len(a.engine.started) == len(b.engine.started) == 1
    for gateway in (a, b):
        await gateway.stop()


async def test_answers_that_make_room_are_forgotten_by_all(tokenizer: HfTokenizer):
    loop = asyncio.get_running_loop()
    logs = SharedLogs(loop.time, TIMES.lease_seconds)
    limits = replace(LIMITS, max_answers=2)
    gateway = KeyedGateway(tokenizer, loop, MemoryJournal(logs), limits=limits)
    for number in range(6):
        client = gateway.ask(f"k{number}")
        await until(lambda: gateway.engine.open)
        gateway.engine.step(6)
        await client.result()
    await until(lambda: len(logs.logs) == 2)
    await gateway.stop()


async def test_leases_are_renewed_while_nothing_comes(world: World):
    a, b = world.gateways
    first = await begun(a)
    second = b.ask()
    await until(lambda: second.num_tokens == 2)
    await asyncio.sleep(2 * TIMES.lease_seconds)
    await settle()
    assert b.engine.started == []
    a.engine.step(4)
    assert await first.result() == await second.result()
