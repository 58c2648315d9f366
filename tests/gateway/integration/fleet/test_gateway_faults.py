"""If clients disconnect or schedulers die, no token is lost, and ended requests leave no state
behind.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from stepwell.gateway.v1 import gateway_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from benchmarks.peers.methods import Direction, Lane
from benchmarks.peers.proxy import PeerProxy
from services.common.pool.block_hash import unpack_token_ids
from tests.gateway.fake_scheduler import FakeScheduler, formula
from tests.gateway.raw_http import post, unchunked
from tests.gateway.serving import Serving, serving, until
from tests.gateway.streams import BODY, PROMPT, Stream, expected


async def test_a_stream_goes_on_when_the_scheduler_comes_back(served: Serving) -> None:
    scheduler = served.scheduler
    scheduler.permits = 10
    stream = Stream(served)
    await until(lambda: len(stream.token_ids) == 10)
    await scheduler.die()
    await until(lambda: served.gateway.membership.num_ready == 0)
    assert (await served.http.get("/health")).status_code == 503
    scheduler.permits = 5
    await scheduler.start()
    await until(lambda: len(stream.token_ids) == 15)
    # The scheduler is lost a second time.
    await scheduler.die()
    scheduler.run_freely()
    await scheduler.start()
    await stream.task
    assert stream.token_ids == expected(30)
    assert stream.finish_reason == "length"
    outputs = [unpack_token_ids(add.output_token_ids) for add in scheduler.adds]
    assert outputs == [[], expected(10), expected(15)]
    assert len({add.request_id for add in scheduler.adds}) == 1


async def four_streams(
    served: Serving, first: FakeScheduler, second: FakeScheduler
) -> list[Stream]:
    """Four streams, two at each scheduler, that have received four tokens and wait."""
    first.permits = second.permits = 0
    streams = [Stream(served) for _ in range(4)]
    await until(lambda: first.num_running == second.num_running == 2)
    first.allow(4)
    second.allow(4)
    await until(lambda: all(len(stream.token_ids) == 4 for stream in streams))
    return streams


async def test_a_stream_goes_on_at_another_replica(model: Path) -> None:
    first, second = FakeScheduler(), FakeScheduler()
    async with serving(model, first, second) as served:
        streams = await four_streams(served, first, second)
        await first.die()
        second.run_freely()
        await asyncio.gather(*(stream.task for stream in streams))
        assert [stream.token_ids for stream in streams] == [expected(30)] * 4
        assert len(second.adds) == 4
        assert (await served.http.get("/health")).status_code == 200


class Damaged(FakeScheduler):
    """A scheduler behind a proxy that can damage one message of a session."""

    damage: Callable[[bytes], bytes | None] | None = None
    """Damages one message. Returns the damaged one, or None to leave the message unchanged."""

    async def start(self, address: str = "") -> str:
        self._proxy = PeerProxy(await super().start(address))
        self._proxy.rule = self
        return await self._proxy.start("127.0.0.1:0")

    async def die(self) -> None:
        await self._proxy.close()
        await super().die()

    async def passed_on(self, lane: Lane, message: bytes) -> list[bytes]:
        if self.damage is not None and lane.direction is Direction.RESPONSE:
            damaged = self.damage(message)
            if damaged is not None:
                self.damage = None
                return [damaged]
        return [message]


def garbled(message: bytes) -> bytes:
    return b"\xff" + message


def with_unequal_arrays(message: bytes) -> bytes | None:
    """Damages the deltas of a step: adds a token count, so that there are more than requests."""
    response = scheduler_pb2.SessionResponse.FromString(message)
    if not response.deltas.handles:
        return None
    response.deltas.num_tokens.append(0)
    return response.SerializeToString()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (garbled, "Session cannot be decoded; its 2 requests continue at another"),
        (with_unequal_arrays, "2 handles, 2 of them different, 3 counts"),
    ],
)
async def test_a_damaged_message_costs_no_stream(
    model: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes | None],
    why: str,
) -> None:
    first, second = Damaged(), FakeScheduler()
    async with serving(model, first, second) as served:
        streams = await four_streams(served, first, second)
        caplog.clear()
        first.damage = damage
        first.allow(4)
        await until(lambda: first.damage is None and first.num_sessions == 2)
        first.run_freely()
        second.run_freely()
        await asyncio.gather(*(stream.task for stream in streams))
        assert [stream.token_ids for stream in streams] == [expected(30)] * 4
        assert [stream.error for stream in streams] == [None] * 4
        assert second.num_sessions == 1
        assert (await served.http.get("/health")).status_code == 200
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert why in lines[0]


async def test_many_kills_lose_and_repeat_nothing(model: Path) -> None:
    first, second = FakeScheduler(), FakeScheduler()
    async with serving(model, first, second) as served:
        first.permits = second.permits = 0
        streams = [Stream(served, {"seed": seed, "max_tokens": 60}) for seed in range(8)]
        for kill in range(8):
            victim = (first, second)[kill % 2]
            for scheduler in (first, second):
                scheduler.allow(3)
            await until(lambda: sum(map(len, (s.token_ids for s in streams))) > 0)
            await victim.die()
            await victim.start()
            await until(lambda: served.gateway.membership.num_ready == 2)
        first.run_freely()
        second.run_freely()
        await asyncio.gather(*(stream.task for stream in streams))
        for seed, stream in enumerate(streams):
            assert stream.error is None
            assert stream.token_ids == [formula(PROMPT, seed, place) for place in range(60)]


async def test_logprobs_and_n_survive_a_loss(served: Serving) -> None:
    scheduler = served.scheduler
    scheduler.permits = 6
    ask = {"prompt": PROMPT, "seed": 11, "max_tokens": 12, "n": 2, "logprobs": 1, "echo": True}
    answer = asyncio.create_task(served.http.post("/v1/completions", json=ask))
    await until(lambda: scheduler.permits == 0)
    await scheduler.die()
    scheduler.run_freely()
    await scheduler.start()
    body = (await answer).json()
    again = (await served.http.post("/v1/completions", json=ask)).json()
    assert [c["text"] for c in body["choices"]] == [c["text"] for c in again["choices"]]
    assert [c["logprobs"] for c in body["choices"]] == [c["logprobs"] for c in again["choices"]]
    # The gateway does not request the prompt's log-probabilities again once they have arrived.
    assert [add.sampling.HasField("prompt_logprobs") for add in scheduler.adds[:4]] == [
        True,
        True,
        False,
        False,
    ]


async def test_without_a_replica_a_request_waits_no_longer_than_said(model: Path) -> None:
    scheduler = FakeScheduler(permits=3)
    async with serving(model, scheduler, resubmit_timeout_seconds=0.3) as served:
        stream = Stream(served)
        await until(lambda: len(stream.token_ids) == 3)
        await scheduler.die()
        await asyncio.wait_for(stream.task, 20)
        assert stream.token_ids == expected(3)
        assert stream.error is not None
        assert stream.error["type"] == "service_unavailable_error"
        # A new request, too, is refused only after `resubmit_timeout_seconds`.
        refused = await served.http.post("/v1/completions", json={"prompt": "the"})
        assert refused.status_code == 503
        assert 1000 <= int(refused.headers["retry-after-ms"]) <= 1251
        assert served.gateway.fleet.num_waiting == 0


async def test_an_answer_that_was_whole_is_not_sent_again(model: Path) -> None:
    """The scheduler dies after it sent the last token, and before it sent the finish reason."""
    scheduler = FakeScheduler(permits=3)
    async with serving(model, scheduler) as served:
        stream = Stream(served, {"stop_token_ids": [expected(3)[2]], "max_tokens": 30})
        await until(lambda: stream.finish_reason == "stop")
        await stream.task
        assert len(scheduler.adds) == 1


async def test_a_replica_that_refuses_is_not_the_last_word(model: Path) -> None:
    first, second = FakeScheduler(), FakeScheduler()
    full = scheduler_pb2.Rejection(code=8, reason="QUEUE_FULL", message="full")
    first.rejection = full
    async with serving(model, first, second) as served:
        # The gateway chooses between equal replicas at random, so `first` gets a request at last.
        while not first.adds:
            response = await served.http.post("/v1/completions", json={"prompt": "the"})
            assert response.status_code == 200
        second.rejection = full
        response = await served.http.post("/v1/completions", json={"prompt": "the"})
        assert response.status_code == 503


async def test_a_request_that_was_taken_once_outwaits_a_full_queue(model: Path) -> None:
    scheduler = FakeScheduler(permits=4)
    async with serving(model, scheduler) as served:
        stream = Stream(served)
        await until(lambda: len(stream.token_ids) == 4)
        await scheduler.die()
        scheduler.rejection = scheduler_pb2.Rejection(
            code=8, reason="QUEUE_FULL", message="full", retry_after_millis=50
        )
        await scheduler.start()
        await until(lambda: len(scheduler.adds) >= 3)
        scheduler.rejection = None
        scheduler.run_freely()
        await stream.task
        assert stream.token_ids == expected(30)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("permits", [0, 3])
async def test_a_client_that_goes_away_aborts(served: Serving, stream: bool, permits: int) -> None:
    """The requests are aborted before and after their first token, streamed or not."""
    scheduler = served.scheduler
    scheduler.permits = permits
    body = json.dumps(BODY | {"stream": stream, "n": 2}).encode()
    host, port = served.base_url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(post("/v1/completions", body))
    await until(lambda: scheduler.num_running == 2 and not scheduler.permits)
    client.close()
    await until(lambda: scheduler.num_running == 0)
    assert len(scheduler.aborts) == 2
    scheduler.run_freely()
    assert (await served.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    await until(lambda: served.gateway.gate.inside == 0)


async def test_a_reader_that_stalls_costs_its_tokens_and_no_more(model: Path) -> None:
    """The engine continues. Tokens that the client has not read are merged into larger events."""
    scheduler = FakeScheduler(
        permits=0, max_model_len=40_000, max_request_tokens=40_000, tokens_per_step=20
    )
    async with serving(model, scheduler) as served:
        body = json.dumps(BODY | {"max_tokens": 30_000, "logprobs": 5}).encode()
        host, port = served.base_url.removeprefix("http://").split(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        writer.write(post("/v1/completions", body))
        await until(lambda: scheduler.num_running == 1)
        scheduler.run_freely()
        await until(lambda: scheduler.num_running == 0)
        other = await served.http.post("/v1/completions", json={"prompt": "a"})
        assert other.status_code == 200
        num_chunks = num_tokens = 0
        pending = b""
        while b"[DONE]" not in pending[-100:]:
            pending += await reader.read(1 << 20)
        for line in unchunked(pending).split(b"\n"):
            if line.startswith(b"data: {"):
                num_chunks += 1
                num_tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
        writer.close()
        assert num_tokens == 30_000
        assert num_chunks < 500


async def test_a_cancelled_call_aborts(served: Serving) -> None:
    scheduler = served.scheduler
    scheduler.permits = 2
    call = served.stub.Generate(
        gateway_pb2.GenerateRequest(
            token_ids={"ids": PROMPT}, sampling={"max_tokens": 100}, request_id="mine"
        )
    )
    await call.read()
    call.cancel()
    await until(lambda: scheduler.aborts == ["mine"])


async def test_a_lost_abort_is_repeated(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = FakeScheduler(permits=2, num_lost_aborts=1)
    async with serving(model, scheduler, session_timeout_seconds=0.5) as served:
        call = served.stub.Generate(
            gateway_pb2.GenerateRequest(
                token_ids={"ids": PROMPT}, sampling={"max_tokens": 100}, request_id="mine"
            )
        )
        await call.read()
        call.cancel()
        await until(lambda: not scheduler.num_lost_aborts)
        scheduler.set_state(ready=False, reason="the workers are away", stalled=True)
        await asyncio.sleep(1.0)
        assert scheduler.num_running == 1, "it cannot answer an abort now"
        scheduler.set_state(ready=True)
        await until(lambda: scheduler.aborts == ["mine"])
        await asyncio.sleep(1.0)
    again = [record for record in caplog.messages if "aborted again" in record]
    assert len(again) == 1, "an abort that was answered is not repeated"


async def test_too_many_at_once(model: Path) -> None:
    async with serving(model, FakeScheduler(permits=0), max_concurrent_requests=2) as served:
        streams = [Stream(served) for _ in range(2)]
        await until(lambda: served.scheduler.num_running == 2)
        async with served.openai() as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model="tiny", prompt="a")
        assert caught.value.status_code == 503
        assert 1000 <= int(caught.value.response.headers["retry-after-ms"]) <= 1251
        served.scheduler.run_freely()
        await asyncio.gather(*(stream.task for stream in streams))


async def test_draining_finishes_what_runs_and_takes_nothing_new(model: Path) -> None:
    async with serving(model, FakeScheduler(permits=2), drain_seconds=600.0) as served:
        stream = Stream(served)
        await until(lambda: len(stream.token_ids) == 2)
        drained = asyncio.create_task(served.gateway.drain())
        await until(lambda: not served.gateway.gate.is_open)
        served.scheduler.run_freely()
        await stream.task
        assert stream.token_ids == expected(30)
        await asyncio.wait_for(drained, 60)
