"""Wrong answers of a pool or worker. After each one, the scheduler opens the pool and the workers
again. It delivers no token of a wrong answer.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2
from stepwell.worker.v1 import worker_pb2

from benchmarks.peers.methods import Direction, Lane, decoded
from benchmarks.peers.proxy import PeerProxy
from services.common.pool.block_hash import pack_token_ids, unpack_token_ids
from tests.scheduler.fake_worker import FakeWorker, Spoil
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import (
    Gateway,
    Pool,
    Worker,
    gateway_of,
    sampling,
    serving_replica,
)
from tests.scheduler.story import prompt

Answer = worker_pb2.ExecuteResponse
Request = worker_pb2.ExecuteRequest
Bytes = Callable[[bytes], list[bytes]]
"""A function that returns the messages to send in place of a message."""

PROMPTS = {handle: prompt(6 + handle, 150 * handle) for handle in range(4)}
POISON = 777
MANY = 120


class Spoiler:
    """Replaces every tenth answer of a worker by a wrong one, with each kind of error once."""

    def __init__(self, worker: FakeWorker) -> None:
        self.kinds: list[Spoil] = [
            lambda _, answer: [answer, answer],
            lambda _, answer: [changed(answer, step=answer.step - 1)],
            lambda _, answer: [changed(answer, generation=answer.generation - 1)],
            lambda _, answer: [changed(answer, token_ids=answer.token_ids + pack_token_ids([5]))],
            lambda _, answer: [changed(answer, token_ids=answer.token_ids[:-1])],
            lambda _, answer: [changed(answer, token_ids=pack_token_ids([200_000]))],
            self._stale,
            self._late,
        ]
        self._num_answers = 0
        self._old = Answer()
        worker.spoil = self

    def __call__(self, step: Request, answer: Answer) -> Sequence[Answer]:
        self._num_answers += 1
        if self.kinds and step.rows and self._num_answers % 10 == 0:
            return self.kinds.pop(0)(step, answer)
        self._old = answer
        return [answer]

    def _stale(self, _step: Request, _answer: Answer) -> Sequence[Answer]:
        return [self._old]

    def _late(self, _step: Request, answer: Answer) -> Sequence[Answer]:
        """Delays an answer until the next answer has been sent."""
        self.kinds.append(lambda _, after: [after, answer])
        self._num_answers = 9
        return []


def changed(answer: Answer, **fields: object) -> Answer:
    copy = Answer()
    copy.CopyFrom(answer)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


async def answer_all(gateway: Gateway) -> None:
    for handle, token_ids in PROMPTS.items():
        await gateway.add(handle, token_ids, sampling=sampling(MANY))
    await gateway.finish(*PROMPTS)
    for handle, token_ids in PROMPTS.items():
        assert gateway.heard[handle].tokens == continuation(token_ids, MANY)


async def test_wrong_answers_of_a_worker_are_no_tokens(caplog: pytest.LogCaptureFixture) -> None:
    worker = FakeWorker(num_blocks=200)
    spoiler = Spoiler(worker)
    num_kinds = len(spoiler.kinds)
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        await answer_all(gateway)
        await replica.until_idle()
    assert not spoiler.kinds
    logged = [  # gRPC's poller may also log an error, with asyncio's logger
        one.getMessage()
        for one in caplog.records
        if one.levelno >= logging.WARNING and one.name.startswith("services.")
    ]
    assert len(logged) == num_kinds, logged
    assert all("it answered step" in line or "is wrong: " in line for line in logged)


async def test_a_request_whose_first_step_was_lost_is_admitted_before_its_tokens() -> None:
    worker = FakeWorker(num_blocks=200)
    lost = [1, 2]

    def spoil(step: Request, answer: Answer) -> Sequence[Answer]:
        if lost and step.new_requests:
            lost.pop()
            return [changed(answer, num_tokens=b"")]
        return [answer]

    worker.spoil = spoil
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, PROMPTS[1], sampling=sampling(3))
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(PROMPTS[1], 3)
        assert gateway.heard[1].num_cached_tokens == 0
        await replica.until_idle()
    assert not lost


async def test_a_request_of_which_answers_are_always_wrong_is_found() -> None:
    worker = FakeWorker(num_blocks=200)

    def spoil(step: Request, answer: Answer) -> Sequence[Answer]:
        is_in = any(POISON in unpack_token_ids(new.token_ids) for new in step.new_requests)
        return [changed(answer, num_tokens=b"")] if is_in else [answer]

    worker.spoil = spoil
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        for handle, token_ids in PROMPTS.items():
            await gateway.add(handle, token_ids, sampling=sampling(MANY))
        await gateway.add(9, [*prompt(5, 600), POISON], sampling=sampling(MANY))
        await gateway.finish(*PROMPTS, 9)
        for handle, token_ids in PROMPTS.items():
            assert gateway.heard[handle].tokens == continuation(token_ids, MANY)
        finished = gateway.heard[9].finished
        assert finished is not None
        assert finished.reason == common_pb2.FINISH_REASON_STEP_FAILED
        await replica.until_idle()


async def test_a_worker_that_always_answers_wrongly_is_waited_for_with_the_reason() -> None:
    worker = FakeWorker()
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, PROMPTS[1], sampling=sampling(MANY))
        await gateway.until_tokens(1, 3)
        worker.spoil = lambda _, answer: [changed(answer, step=answer.step + 1)]
        await replica.until(
            lambda stats: "is wrong: it has the numbers of step" in stats.state_reason
        )
        num_steps = len(worker.steps)
        await replica.until(lambda _: len(worker.steps) >= num_steps + 2)
        await gateway.until(lambda: gateway.state is not None and bool(gateway.state.reason))
        worker.spoil = lambda _, answer: [answer]
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(PROMPTS[1], MANY)
        await replica.until_idle()


class Proxied(Pool):
    """A pool or worker behind a proxy. Of the messages of a lane (one direction of a gRPC method),
    the proxy damages every `every`-th, each time in the next of the ways `kinds`.
    """

    every = 10

    def __init__(self, service: Pool | Worker, lane: Lane, kinds: Sequence[Bytes]) -> None:
        self.kinds = list(kinds)
        self._service = service
        self._lane = lane
        self._num_answers = 0
        self._proxy: PeerProxy | None = None

    async def start(self) -> str:
        self._proxy = PeerProxy(await self._service.start())
        self._proxy.rule = self
        return await self._proxy.start("127.0.0.1:0")

    async def stop(self) -> None:
        assert self._proxy is not None
        await self._proxy.close()
        await self._service.stop()

    async def stats(self) -> kvpool_pb2.PoolStats:
        assert isinstance(self._service, Pool)
        return await self._service.stats()

    async def passed_on(self, lane: Lane, message: bytes) -> list[bytes]:
        self._num_answers += lane == self._lane
        if lane == self._lane and self.kinds and self._num_answers % self.every == 0:
            return self.kinds.pop(0)(message)
        return [message]


TRANSACT, EXECUTE = "/stepwell.kvpool.v1.KVPool/Transact", "/stepwell.worker.v1.Worker/Execute"


def outcome(message: bytes, **fields: object) -> list[bytes]:
    answer = kvpool_pb2.TransactResponse.FromString(message)
    for name, value in fields.items():
        setattr(answer, name, value)
    return [answer.SerializeToString()]


def without_results(message: bytes) -> list[bytes]:
    answer = kvpool_pb2.TransactResponse.FromString(message)
    answer.results.add()
    return [answer.SerializeToString()]


WRONG_OUTCOMES: list[Bytes] = [
    lambda message: [b"\xff" + message],
    lambda message: [message, message],
    lambda message: outcome(message, sequence=1),
    lambda message: outcome(message, generation=1),
    lambda message: outcome(message, num_free_blocks=200),
    without_results,
]


async def test_wrong_answers_of_a_pool_are_no_blocks(caplog: pytest.LogCaptureFixture) -> None:
    pool = Proxied(Pool(), Lane(TRANSACT, Direction.RESPONSE), WRONG_OUTCOMES)
    worker = FakeWorker(num_blocks=200)
    async with serving_replica(worker, pool=pool) as replica, gateway_of(replica) as gateway:
        await answer_all(gateway)
        await replica.until_idle()
    assert not pool.kinds
    logged = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(logged) == len(WRONG_OUTCOMES), logged
    assert all("the kvpool was lost: its answer to transaction" in line for line in logged)


def without_releases(message: bytes) -> list[bytes]:
    asked = kvpool_pb2.TransactRequest.FromString(message)
    for operation in asked.operations:
        if operation.HasField("release"):
            operation.release.ClearField("requests")
    return [asked.SerializeToString()]


async def test_blocks_that_were_not_freed_are_found_when_no_request_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Proxied(Pool(), Lane(TRANSACT, Direction.REQUEST), [without_releases] * 50)
    pool.every = 1
    async with serving_replica(FakeWorker(), pool=pool) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, PROMPTS[1], sampling=sampling(3))
        await gateway.finish(1)
        await gateway.until(
            lambda: any("blocks are still in use" in one.reason for one in gateway.states)
        )
        pool.kinds.clear()
        await replica.until_idle()
        assert (await pool.stats()).num_requests == 0
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "blocks are still in use, although no request has blocks" in lines[0]


async def test_what_cannot_be_decoded_is_a_new_generation(caplog: pytest.LogCaptureFixture) -> None:
    kinds: list[Bytes] = [lambda message: [b"\xff" + message]]
    for direction in Direction:
        caplog.clear()
        worker = Proxied(FakeWorker(num_blocks=200), Lane(EXECUTE, direction), kinds)
        async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
            await gateway.add(1, PROMPTS[1], sampling=sampling(MANY))
            await gateway.finish(1)
            assert gateway.heard[1].tokens == continuation(PROMPTS[1], MANY)
            await replica.until_idle()
        assert not worker.kinds
        lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(lines) == 1
        assert "cannot be decoded" in lines[0]


async def test_a_request_of_which_transactions_are_always_answered_wrongly_is_found() -> None:
    poisoned = [*prompt(5, 600), POISON]

    class Poisoned(Proxied):
        """A pool behind a proxy. Its answer is wrong whenever the transaction admits the poisoned
        request, which is recognized by its number of prompt tokens.
        """

        is_wrong = False

        async def passed_on(self, lane: Lane, message: bytes) -> list[bytes]:
            if lane.direction is Direction.REQUEST and lane.method == TRANSACT:
                asked = kvpool_pb2.TransactRequest.FromString(message)
                self.is_wrong = any(
                    admission.num_prompt_tokens == len(poisoned)
                    for operation in asked.operations
                    for admission in operation.admit.admissions
                )
            elif lane == self._lane and self.is_wrong:
                return outcome(message, num_free_blocks=200)
            return [message]

    pool = Poisoned(Pool(), Lane(TRANSACT, Direction.RESPONSE), ())
    worker = FakeWorker(num_blocks=200)
    async with serving_replica(worker, pool=pool) as replica, gateway_of(replica) as gateway:
        for handle in (1, 2, 3):
            await gateway.add(handle, PROMPTS[handle], sampling=sampling(MANY))
        await gateway.add(9, poisoned, sampling=sampling(MANY))
        await gateway.finish(1, 2, 3, 9)
        for handle in (1, 2, 3):
            assert gateway.heard[handle].tokens == continuation(PROMPTS[handle], MANY)
        finished = gateway.heard[9].finished
        assert finished is not None
        assert finished.reason == common_pb2.FINISH_REASON_STEP_FAILED
        assert "or the kvpool" in finished.message
        await replica.until_idle()


@pytest.mark.parametrize(
    "wrong",
    [{"fingerprint": b"g" * 32}, {"vocab_size": 9}, {"rank": 1}, {"seen_generation": 2**63}],
)
async def test_one_wrong_description_of_a_worker_ends_nothing(wrong: dict[str, Any]) -> None:
    worker = FakeWorker()
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, PROMPTS[1], sampling=sampling(MANY))
        await gateway.until_tokens(1, 3)
        await worker.stop()
        right = worker_pb2.DescribeResponse()
        right.CopyFrom(worker.description)
        worker.description.MergeFrom(worker_pb2.DescribeResponse(**wrong))
        worker.described = lambda: worker.description.CopyFrom(right)
        await worker.start()
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(PROMPTS[1], MANY)


@pytest.mark.parametrize(
    ("method", "peer"),
    [
        ("/stepwell.worker.v1.Worker/Describe", "the worker at"),
        ("/stepwell.kvpool.v1.KVPool/OpenPool", "the kvpool"),
    ],
)
async def test_a_peer_that_answers_in_another_protocol_is_waited_for_with_the_reason(
    method: str, peer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler compares the protocol numbers, which an older peer may not do."""
    lane = Lane(method, Direction.RESPONSE)

    def older(message: bytes) -> list[bytes]:
        answer: Any = decoded(lane, message)
        answer.release.CopyFrom(common_pb2.Release(protocol=1, version="0.9"))
        return [answer.SerializeToString()]

    worker, pool = (Proxied(one, lane, [older]) for one in (FakeWorker(), Pool()))
    worker.every = pool.every = 1
    caplog.set_level(logging.INFO)
    async with serving_replica(worker, pool=pool) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, PROMPTS[1], sampling=sampling(3))
        await gateway.finish(1)
    lines = [one.getMessage() for one in caplog.records if "of different" in one.message]
    assert len(lines) == 1
    assert peer in lines[0]
    assert "version 0.9 (protocol 1)" in lines[0]


async def test_a_description_that_does_not_come_ends_nothing() -> None:
    class Silent(Proxied):
        """A pool or worker behind a proxy that drops the first two answers of one method."""

        num_swallowed = 0

        async def passed_on(self, lane: Lane, message: bytes) -> list[bytes]:
            if lane == self._lane and self.num_swallowed < 2:
                self.num_swallowed += 1
                return []
            return [message]

    describe = Lane("/stepwell.worker.v1.Worker/Describe", Direction.RESPONSE)
    open_pool = Lane("/stepwell.kvpool.v1.KVPool/OpenPool", Direction.RESPONSE)
    worker, pool = Silent(FakeWorker(), describe, ()), Silent(Pool(), open_pool, ())
    async with serving_replica(worker, pool=pool) as replica, gateway_of(replica) as gateway:
        await gateway.add(1, PROMPTS[1], sampling=sampling(MANY))
        await gateway.finish(1)
        assert gateway.heard[1].tokens == continuation(PROMPTS[1], MANY)
    assert worker.num_swallowed == pool.num_swallowed == 2
