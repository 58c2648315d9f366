"""A gateway computes requests with the same idempotency key once. It keeps a limited number of
answers for a limited time.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ResourceExhausted
from services.common.request.finish import Finish, FinishReason
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.options.idempotency.core.key import KeyReused
from tests.gateway.fake_fleet import ManualClock
from tests.gateway.options.idempotency.keyed_world import LIMITS, KeyedGateway, settle, token_at


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> HfTokenizer:
    return load_tokenizer(model)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gateway(tokenizer: HfTokenizer, clock: ManualClock) -> KeyedGateway:
    return KeyedGateway(tokenizer, clock)


def limited(tokenizer: HfTokenizer, clock: ManualClock, **limits: Any) -> KeyedGateway:
    return KeyedGateway(tokenizer, clock, limits=replace(LIMITS, **limits))


async def test_two_clients_read_one_answer_from_its_beginning(gateway: KeyedGateway):
    first = gateway.ask()
    await settle()
    gateway.engine.step(3)
    await settle()
    second = gateway.ask()
    await settle()
    assert second.token_ids == first.token_ids
    assert second.num_tokens == 3
    gateway.engine.step(3)
    [tokens] = await first.result()
    assert await second.result() == [tokens]
    [(requests, _)] = gateway.engine.started
    assert tokens == [token_at(requests[0], position) for position in range(6)]
    assert (second.request_id, second.created) == (first.request_id, first.created)
    assert [first.is_replay, second.is_replay] == [False, True]
    third = gateway.ask()
    assert await third.result() == [tokens]
    assert third.answers[0].last.finish_reason == first.answers[0].last.finish_reason
    assert (gateway.keyed.counts.begun, gateway.keyed.counts.attached) == (1, 2)


async def test_the_deadline_of_the_first_client_does_not_end_the_others_answer(
    gateway: KeyedGateway, clock: ManualClock
):
    client = gateway.ask(deadline=clock.time() + 1)
    await settle()
    [([request], _)] = gateway.engine.started
    assert request.deadline is None
    await client.leave()


async def test_an_answer_goes_on_when_its_client_has_gone(
    gateway: KeyedGateway, clock: ManualClock
):
    first = gateway.ask()
    await settle()
    gateway.engine.step(2)
    await first.leave()
    gateway.engine.step(2)
    clock.advance(LIMITS.linger_seconds - 1)
    await settle()
    second = gateway.ask()
    await settle()
    assert second.num_tokens == 4
    clock.advance(LIMITS.linger_seconds * 2)
    gateway.engine.step(2)
    assert len((await second.result())[0]) == 6
    assert len(gateway.engine.started) == 1


async def test_an_answer_that_no_client_reads_stops_and_goes_on_later(
    gateway: KeyedGateway, clock: ManualClock
):
    first = gateway.ask(temperature=1.0)
    await settle()
    gateway.engine.step(2)
    await first.leave()
    clock.advance(LIMITS.linger_seconds)
    await settle()
    assert gateway.engine.open == []
    second = gateway.ask(temperature=1.0)
    await settle()
    gateway.engine.step(4)
    [tokens] = await second.result()
    (before, _), (after, [progress]) = gateway.engine.started
    assert progress.token_ids == tokens[:2]
    assert after[0].sampling == before[0].sampling
    assert tokens == [token_at(before[0], position) for position in range(6)]
    counts = gateway.keyed.counts
    assert (counts.begun, counts.suspended, counts.resumed) == (1, 1, 1)


async def test_so_many_answers_go_on_without_a_client_and_no_more(
    tokenizer: HfTokenizer, clock: ManualClock
):
    gateway = limited(tokenizer, clock, max_detached=2)
    for number in range(4):
        client = gateway.ask(f"k{number}")
        await settle()
        await client.leave()
    await settle()
    assert len(gateway.engine.open) == 2
    assert gateway.keyed.counts.suspended == 2
    again = gateway.ask("k3")  # has a client again, and is not detached
    await settle()
    gone = gateway.ask("k4")
    await settle()
    await gone.leave()
    await settle()
    assert len(gateway.engine.open) == 3
    assert gateway.keyed.counts.suspended == 2
    await again.leave()


async def test_a_key_belongs_to_one_request_of_one_tenant(gateway: KeyedGateway):
    client = gateway.ask()
    await settle()
    for other in ({"max_tokens": 7}, {"prompts": ([5, 7],)}, {"seed": 3}, {"n": 2}, {"stop": "x"}):
        with pytest.raises(KeyReused):
            await gateway.ask(**other).result()
    assert gateway.keyed.counts.refused == 5
    theirs = gateway.ask(caller="them", max_tokens=7)
    await settle()
    gateway.engine.step(7)
    assert len((await theirs.result())[0]) == 7
    assert len((await client.result())[0]) == 6


async def test_an_error_is_not_remembered(gateway: KeyedGateway):
    full = ResourceExhausted("the queue is full", retry_after_seconds=1.0)
    first, second = gateway.ask(), gateway.ask()
    await settle()
    gateway.engine.step(1)
    await settle()
    gateway.engine.fail(full)
    for client in (first, second):
        with pytest.raises(ResourceExhausted) as caught:
            await client.result()
        assert caught.value is full
    assert len(gateway.keyed) == 0
    third = gateway.ask()
    await settle()
    gateway.engine.step(6)
    await third.result()
    assert third.request_id != first.request_id
    assert gateway.keyed.counts.begun == 2


@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_an_error_of_one_sequence_ends_the_answer(gateway: KeyedGateway, stop: tuple):
    """When one of three sequences fails, another has ended, and all have new output."""
    clients = [gateway.ask(n=3, stop=stop) for _ in range(2)]
    await settle()
    gateway.engine.step()
    ended, failed, _ = gateway.engine.open
    ended.finished(Finish(FinishReason.LENGTH))
    failed.failed(ResourceExhausted("a lost step"))
    del gateway.engine.open[:2]
    await settle()
    gateway.engine.step()
    for client in clients:
        with pytest.raises(ResourceExhausted, match="a lost step"):
            await client.result()
    await settle()
    assert gateway.engine.open == []
    again = gateway.ask(n=3, stop=stop)
    await settle()
    gateway.engine.step(6)
    assert [len(tokens) for tokens in await again.result()] == [6, 6, 6]


@pytest.mark.parametrize("stop", [(), ("zzz",)])
async def test_several_prompts_and_answers_with_logprobs(gateway: KeyedGateway, stop: tuple):
    ask = {"prompts": ([5, 6], [7, 8]), "n": 2, "logprobs": 0, "stop": stop}
    first = gateway.ask(**ask)
    await settle()
    gateway.engine.step(2)
    await settle()
    await first.leave()
    second = gateway.ask(**ask)
    await settle()
    gateway.engine.step(4)
    tokens = await second.result()
    [(requests, _)] = gateway.engine.started
    assert tokens == [[token_at(one, position) for position in range(6)] for one in requests]
    for answer in second.answers:
        assert answer.logprobs is not None
        assert list(answer.logprobs.ranks) == [1, 2, 3, 4, 5, 6]
        assert list(answer.logprobs.token_ids) == answer.token_ids


async def test_a_stop_string_ends_an_answer_that_no_client_reads(
    gateway: KeyedGateway, clock: ManualClock
):
    whole = gateway.ask("whole", seed=4)
    await settle()
    gateway.engine.step(6)
    await whole.result()
    text = whole.answers[0].text
    stop = (text[len(text) // 2 :][:2],)
    first = gateway.ask(seed=4, stop=stop)
    await settle()
    await first.leave()
    gateway.engine.step(3)
    clock.advance(
        LIMITS.linger_seconds
    )  # the answer is suspended, and its text is decoded again when it continues
    second = gateway.ask(seed=4, stop=stop)
    await settle()
    await second.leave()
    gateway.engine.step(6)
    await settle()
    assert gateway.engine.open == []
    third = gateway.ask(seed=4, stop=stop)
    await third.result()
    assert third.answers[0].text == text[: text.index(stop[0])]
    assert third.answers[0].last.stop_reason == stop[0]
    assert len(gateway.engine.started) == 3


async def test_answers_are_forgotten_after_a_time(gateway: KeyedGateway, clock: ManualClock):
    client = gateway.ask()
    await settle()
    gateway.engine.step(6)
    await client.result()
    clock.advance(LIMITS.retention_seconds - 1)
    assert len(gateway.keyed) == 1
    await gateway.ask().result()  # reading the kept answer counts as a use
    clock.advance(LIMITS.retention_seconds - 1)
    assert len(gateway.keyed) == 1
    clock.advance(2)
    assert len(gateway.keyed) == 0
    assert gateway.keyed.num_bytes == 0


async def test_a_claim_whose_client_never_reads_stops_too(
    gateway: KeyedGateway, clock: ManualClock
):
    client = gateway.ask()
    await settle()
    (request,) = gateway.keyed._table.values()
    request._on_left = lambda _: None
    request.readers.clear()  # as if the client had disconnected before its first read
    gateway.keyed._expect_reader(request)
    clock.advance(100)
    await settle()
    assert gateway.engine.open == []
    await client.leave()


async def test_the_least_used_answers_make_room(tokenizer: HfTokenizer, clock: ManualClock):
    gateway = limited(tokenizer, clock, max_answers=3)
    for number in range(3):
        client = gateway.ask(f"k{number}")
        await settle()
        gateway.engine.step(6)
        await client.result()
    await gateway.ask("k0").result()
    running = gateway.ask("new")
    await settle()
    assert gateway.keyed.counts.evicted == 1
    for number, is_there in enumerate([True, False, True]):
        started = len(gateway.engine.started)
        if is_there:
            await gateway.ask(f"k{number}").result()
        assert len(gateway.engine.started) == started
    gateway.engine.step(6)
    await running.result()
    await gateway.ask("k0").result()
    assert len(gateway.engine.started) == 4


async def test_the_answers_unused_for_longest_are_forgotten_where_bytes_run_out(
    tokenizer: HfTokenizer, clock: ManualClock
):
    gateway = limited(tokenizer, clock, max_bytes=5_000, max_answers=100)
    for number in range(20):
        client = gateway.ask(f"k{number}", max_tokens=50)
        await settle()
        gateway.engine.step(50)
        await client.result()
        await settle()
        assert gateway.keyed.num_bytes <= 5_000
    assert len(gateway.keyed) == 4
    assert gateway.keyed.counts.evicted == 16


async def test_a_hundred_requests_at_once_are_computed_once(gateway: KeyedGateway):
    clients = [gateway.ask() for _ in range(100)]
    await settle()
    gateway.engine.step(6)
    answers = [await client.result() for client in clients]
    assert answers == [answers[0]] * 100
    assert len(gateway.engine.started) == 1
    assert len({client.request_id for client in clients}) == 1


async def test_closing_tells_readers_and_stops_the_engine(gateway: KeyedGateway):
    client = gateway.ask()
    await settle()
    gateway.engine.step(2)
    await settle()
    await gateway.keyed.close(ResourceExhausted("going"))
    with pytest.raises(ResourceExhausted):
        await client.result()
    assert client.num_tokens == 2
    assert gateway.engine.open == []
