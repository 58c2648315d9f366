"""Delivery of an answer's tokens to a sink."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from services.common.errors import DeadlineExceeded, Unavailable
from services.common.request.finish import Finish, FinishReason
from services.common.request.sampling import SamplingParams
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.delivery import TOKENS_AT_A_TIME, Delivery, received
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.inflight import Inflight, Mailbox
from services.gateway.core.request.request import ClientRequest, EngineRequest, Prompt
from tests.gateway.tiny_tokenizer import write_tokenizer

SECONDS = 60
LENGTH = Finish(FinishReason.LENGTH)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("model")))


class Engine:
    """A Source whose tokens the test sets."""

    def __init__(self) -> None:
        self.dropped: list[Inflight] = []
        self.inflights: list[Inflight] = []

    def start(self, requests: Sequence[EngineRequest]) -> Mailbox:
        mailbox = Mailbox(requests, iter(range(99)), self.dropped.append, lambda: 0)
        self.inflights = mailbox.inflights
        return mailbox


class Pieces:
    """A sink that stores the tokens of each item. With `one_at_a_time`, it is full after each item
    until the test sets `has_room`.
    """

    def __init__(
        self, on_put: Callable[[], None] = lambda: None, *, one_at_a_time: bool = False
    ) -> None:
        self.token_ids: list[list[int]] = []
        self.num_drained = 0
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._on_put = on_put
        self._one_at_a_time = one_at_a_time

    @property
    def is_ready(self) -> bool:
        return self.has_room.is_set()

    def put(self, added: list[Piece]) -> None:
        assert self.is_ready
        self.token_ids += [piece.token_ids for piece in added]
        if self._one_at_a_time:
            self.has_room.clear()
        self._on_put()

    async def drain(self) -> None:
        self.num_drained += 1
        await self.has_room.wait()


def make(
    tokenizer: HfTokenizer, sink: Pieces, *, min_tokens: int = 1, stop: tuple[str, ...] = ()
) -> tuple[Engine, Delivery]:
    request = ClientRequest("r", (Prompt([5]),), SamplingParams(max_tokens=1000), stop=stop)
    sequence = EngineRequest("r", [5], request.sampling, 0, "", 0)
    generation = Generation(request, Identity("r", 0, 0), [sequence], tokenizer)
    engine = Engine()
    return engine, Delivery(generation, engine, sink, min_tokens)


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_comes_in_one_turn_is_one_item_and_wakes_no_task(tokenizer) -> None:
    sink = Pieces()
    engine, delivery = make(tokenizer, sink)
    running = asyncio.create_task(delivery.run())
    await turns()
    for token in range(10, 14):
        engine.inflights[0].tokens([token])
        engine.inflights[0].tokens([token + 10])
        await turns(1)
    assert sink.token_ids == [[10, 20], [11, 21], [12, 22], [13, 23]]
    engine.inflights[0].tokens([30])
    engine.inflights[0].finished(LENGTH)
    async with asyncio.timeout(SECONDS):
        await running
    assert (sink.token_ids[4:], sink.num_drained, engine.dropped) == ([[30]], 0, [])


async def test_an_answer_begins_before_what_others_are_given_in_the_same_turn(tokenizer) -> None:
    events: list[str] = []

    class Beginning(Pieces):
        async def drain(self) -> None:
            events.append("drained")
            self.has_room.set()

    running, sinks = [], [Pieces(lambda: events.append("other")) for _ in range(3)]
    engines = []
    for sink in sinks:
        engine, delivery = make(tokenizer, sink)
        engines.append(engine)
        running.append(asyncio.create_task(delivery.run()))
    await turns()
    for engine in engines:
        engine.inflights[0].tokens([7])
    await turns()
    events.clear()
    new, delivery = make(tokenizer, Beginning(lambda: events.append("new"), one_at_a_time=True))
    running.append(asyncio.create_task(delivery.run()))
    await turns()
    new.inflights[0].tokens([7])
    for engine in engines:
        engine.inflights[0].tokens([8])
    await turns()
    assert events == ["new", "drained", *["other"] * 3]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_while_the_sink_is_full_what_comes_is_merged(tokenizer) -> None:
    sink = Pieces(one_at_a_time=True)
    engine, delivery = make(tokenizer, sink)
    running = asyncio.create_task(delivery.run())
    await turns()
    for token in (10, 11, 12):
        engine.inflights[0].tokens([token])
        await turns()
    assert sink.token_ids == [[10]]
    sink.has_room.set()
    await turns()
    assert sink.token_ids == [[10], [11, 12]]
    engine.inflights[0].finished(LENGTH)
    sink.has_room.set()
    await turns()
    sink.has_room.set()
    async with asyncio.timeout(SECONDS):
        await running
    assert sink.token_ids == [[10], [11, 12], []]


async def test_many_tokens_are_put_in_parts_between_which_the_loop_turns(tokenizer) -> None:
    num_turns, seen = 0, []

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    sink = Pieces(lambda: seen.append(num_turns))
    engine, delivery = make(tokenizer, sink)
    running = asyncio.create_task(delivery.run())
    await turns()
    counting = asyncio.create_task(count())
    engine.inflights[0].tokens([7] * (2 * TOKENS_AT_A_TIME + 1))
    engine.inflights[0].finished(LENGTH)
    async with asyncio.timeout(SECONDS):
        await running
    counting.cancel()
    await asyncio.gather(counting, return_exceptions=True)
    assert [len(token_ids) for token_ids in sink.token_ids] == [TOKENS_AT_A_TIME] * 2 + [1]
    assert len(set(seen)) == 3


async def test_what_comes_between_parts_follows_them(tokenizer) -> None:
    def put() -> None:
        if len(sink.token_ids) == 1:
            engine.inflights[0].tokens([9])

    sink = Pieces(put)
    engine, delivery = make(tokenizer, sink)
    running = asyncio.create_task(delivery.run())
    await turns()
    engine.inflights[0].tokens([7] * (TOKENS_AT_A_TIME + 1))
    await turns()
    assert [token_ids[-1] for token_ids in sink.token_ids] == [7, 7, 9]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_later_tokens_come_so_many_at_a_time_and_what_is_left_with_the_end(tokenizer) -> None:
    sink = Pieces()
    engine, delivery = make(tokenizer, sink, min_tokens=3)
    running = asyncio.create_task(delivery.run())
    await turns()
    for token in range(10, 18):
        engine.inflights[0].tokens([token])
        await turns()
    assert sink.token_ids == [[10], [11, 12, 13], [14, 15, 16]]
    engine.inflights[0].finished(LENGTH)
    async with asyncio.timeout(SECONDS):
        await running
    assert sink.token_ids[3:] == [[17]]


async def test_with_stop_strings_each_token_is_looked_at(tokenizer) -> None:
    sink = Pieces()
    engine, delivery = make(tokenizer, sink, min_tokens=3, stop=("never",))
    running = asyncio.create_task(delivery.run())
    await turns()
    for token in (10, 11, 12):
        engine.inflights[0].tokens([token])
        await turns()
    assert sink.token_ids == [[10], [11], [12]]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_error_is_raised_after_what_came_before_it(tokenizer) -> None:
    sink = Pieces()
    engine, delivery = make(tokenizer, sink)
    running = asyncio.create_task(delivery.run())
    await turns()
    engine.inflights[0].tokens([7])
    await turns()
    engine.inflights[0].failed(Unavailable("gone"))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(Unavailable, match="gone"):
            await running
    assert sink.token_ids == [[7]]


@pytest.mark.parametrize("num_tokens", [1, TOKENS_AT_A_TIME + 1])
async def test_tokens_that_come_together_with_an_error_are_put_before_it(
    tokenizer, num_tokens: int
) -> None:
    sink = Pieces()
    engine, delivery = make(tokenizer, sink)
    running = asyncio.create_task(delivery.run())
    await turns()
    tokens = [7] * num_tokens
    engine.inflights[0].tokens(tokens)
    engine.inflights[0].failed(Unavailable("lost"))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(Unavailable, match="lost"):
            await running
    assert [token for piece in sink.token_ids for token in piece] == tokens


async def test_an_end_from_outside_waits_for_what_is_drained_and_aborts_the_rest(tokenizer) -> None:
    sink = Pieces(one_at_a_time=True)
    engine, delivery = make(tokenizer, sink)
    running = asyncio.create_task(delivery.run())
    await turns()
    engine.inflights[0].tokens([7])
    await turns()
    inflights = list(engine.inflights)
    delivery.end(DeadlineExceeded("late"))
    await turns()
    assert not running.done()
    sink.has_room.set()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(DeadlineExceeded, match="late"):
            await running
    assert engine.dropped == inflights


async def test_tokens_that_were_not_put_are_counted_and_those_after_the_end_are_not(
    tokenizer,
) -> None:
    sink = Pieces(one_at_a_time=True)
    engine, delivery = make(tokenizer, sink)
    running = asyncio.create_task(delivery.run())
    await turns()
    engine.inflights[0].tokens([7] * (3 * TOKENS_AT_A_TIME))
    await turns()
    engine.inflights[0].tokens([7])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(sink.token_ids) == 1
    assert delivery._generation.usage().num_generated_tokens == 3 * TOKENS_AT_A_TIME + 1

    def put() -> None:
        engine.inflights[0].tokens([9])

    (stop,) = tokenizer._backend.encode("x", add_special_tokens=False).ids
    engine, delivery = make(tokenizer, Pieces(put), stop=("x",))
    running = asyncio.create_task(delivery.run())
    await turns()
    engine.inflights[0].tokens([stop])
    async with asyncio.timeout(SECONDS):
        await running
    assert delivery._generation.usage().num_generated_tokens == 1


async def test_an_error_of_the_sink_is_that_of_the_run(tokenizer) -> None:
    def fail() -> None:
        raise ValueError("broken")

    engine, delivery = make(tokenizer, Pieces(fail))
    running = asyncio.create_task(delivery.run())
    await turns()
    engine.inflights[0].tokens([7])
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ValueError, match="broken"):
            await running
    assert len(engine.dropped) == 1


async def test_a_cancelled_run_aborts_its_sequences_and_hears_no_more(tokenizer) -> None:
    sink = Pieces()
    engine, delivery = make(tokenizer, sink)
    running = asyncio.create_task(delivery.run())
    await turns()
    (inflight,) = engine.inflights
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    inflight.tokens([7])
    await turns()
    assert (engine.dropped, sink.token_ids) == ([inflight], [])


async def test_what_came_is_received_once() -> None:
    engine = Engine()
    mailbox = engine.start([EngineRequest("r", [5], SamplingParams(), 0, "", 0)])
    waiting = asyncio.create_task(received(mailbox))
    await turns()
    engine.inflights[0].tokens([7])
    [(index, delta)] = await waiting
    assert (index, delta.token_ids, mailbox.take()) == (0, [7], [])
