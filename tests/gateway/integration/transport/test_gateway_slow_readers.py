"""A client that stops reading is disconnected after a while. Other clients are not affected."""

import asyncio
import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from stepwell.gateway.v1 import gateway_pb2

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.raw_http import post, unchunked
from tests.gateway.serving import Serving, serving, until
from tests.slowness import busy_slowness

LONG = {"max_model_len": 400_000, "max_request_tokens": 400_000, "tokens_per_step": 500}
SLOWLY_SECONDS = 0.04


def long_request() -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        token_ids={"ids": [5, 6, 7]}, sampling={"max_tokens": 300_000, "logprobs": 10}
    )


def num_cut(served_metrics: str, protocol: str) -> float:
    for line in served_metrics.splitlines():
        if line.startswith("stepwell_gateway_readers_cut_total") and f'"{protocol}"' in line:
            return float(line.rpartition(" ")[2])
    return 0.0


async def read_on(call: Any) -> list[int]:
    token_ids: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        token_ids += message.token_ids
        await asyncio.sleep(SLOWLY_SECONDS)
    return token_ids


async def metrics(served: Serving) -> str:
    return (await served.http.get("/metrics")).text


async def test_a_grpc_client_that_stops_reading_is_cut(model: Path) -> None:
    scheduler = FakeScheduler(**LONG)
    async with serving(model, scheduler, reader_timeout_seconds=0.5) as served:
        call = served.stub.Generate(long_request())
        await call.read()
        await until(lambda: served.gateway.gate.inside == 0)
        await until(lambda: scheduler.num_running == 0)
        assert num_cut(await metrics(served), "grpc") == 1
        # The client can still read the messages sent before, and then the status.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_on(call), 60)
        assert caught.value.code() == grpc.StatusCode.ABORTED
        assert "read no message for 0.5 s" in (caught.value.details() or "")


async def until_cut(served: Serving, num_clients: int) -> None:
    async with asyncio.timeout(60):
        while num_cut(await metrics(served), "http") < num_clients:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def slow_socket(served: Serving) -> socket.socket:
    host, port = served.base_url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    return client


def ask(client: socket.socket, **body: Any) -> None:
    asked = {"prompt": [5, 6, 7], "max_tokens": 300_000, "logprobs": 5, "stream": True} | body
    client.sendall(post("/v1/completions", json.dumps(asked).encode()))


@pytest.mark.parametrize("stream", [True, False])
async def test_an_http_client_that_stops_reading_is_cut(model: Path, stream: bool) -> None:
    """A whole answer is buffered and releases its slot at once. Its connection is closed."""
    scheduler = FakeScheduler(**LONG)
    async with serving(model, scheduler, reader_timeout_seconds=0.5) as served:
        with slow_socket(served) as client:
            ask(client, stream=stream, max_tokens=300_000 if stream else 20_000)
            await until(lambda: served.gateway.gate.inside == 1)
            await until(lambda: served.gateway.gate.inside == 0)
            await until(lambda: scheduler.num_running == 0)
            await until_cut(served, 1)


async def test_many_slow_readers_do_not_hurt_others(model: Path) -> None:
    scheduler = FakeScheduler(permits=0, **LONG)
    async with serving(model, scheduler, reader_timeout_seconds=1.0) as served:
        with ExitStack() as clients:
            for _ in range(20):
                ask(clients.enter_context(slow_socket(served)))
            other = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "a"}))
            await until(lambda: scheduler.num_running == 21)
            # The answers exceed the kernel's buffers, so the gateway cannot write them at once.
            scheduler.allow(8)
            assert (await other).status_code == 200
            await until(lambda: served.gateway.gate.inside == 0)
            await until(lambda: scheduler.num_running == 0)
            await until_cut(served, 20)


async def test_a_slow_but_steady_http_reader_is_not_cut(model: Path) -> None:
    scheduler = FakeScheduler(**LONG)
    timeout = 1.0 + busy_slowness()
    async with serving(model, scheduler, reader_timeout_seconds=timeout) as served:
        reader, writer = await asyncio.open_connection(sock=slow_socket(served), limit=1024)
        body = {"prompt": [5, 6, 7], "max_tokens": 5000, "logprobs": 5, "stream": True}
        writer.write(post("/v1/completions", json.dumps(body).encode()))
        answer = b""
        while b"[DONE]" not in answer[-100:]:
            piece = await reader.read(8192)
            assert piece, "the connection ended before the answer"
            answer += piece
            await asyncio.sleep(0.02)
        writer.close()
        assert num_cut(await metrics(served), "http") == 0


async def test_a_slow_but_steady_grpc_reader_is_not_cut(model: Path) -> None:
    scheduler = FakeScheduler(**LONG | {"tokens_per_step": 50})
    timeout = 1.0 + busy_slowness()  # a busy machine delays the client, too
    async with serving(model, scheduler, reader_timeout_seconds=timeout) as served:
        request = long_request()
        request.sampling.max_tokens = 3000
        call = served.stub.Generate(request)
        assert len(await read_on(call)) == 3000


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_being_written_at_its_deadline_stays_in_one_piece(
    model: Path, stream: bool
) -> None:
    """After the deadline, a whole answer is written to its end, a stream up to an event's end."""
    scheduler = FakeScheduler(**LONG | {"tokens_per_step": 4000})
    async with serving(model, scheduler) as served:
        reader, writer = await asyncio.open_connection(sock=slow_socket(served), limit=1024)
        body = {"prompt": [5, 6, 7], "max_tokens": 8000, "logprobs": 5, "stream": stream}
        headers = ("X-Request-Timeout: 1", "Connection: close")
        writer.write(post("/v1/completions", json.dumps(body).encode(), *headers))
        await until(lambda: scheduler.num_running == 1)
        await until(lambda: scheduler.num_running == 0)
        await asyncio.sleep(1.0)
        answer = b""
        while piece := await reader.read(1 << 16):
            answer += piece
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        text = unchunked(answer)
        if stream:
            events = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: ")]
            assert events.pop() == b"[DONE]"
            assert all(json.loads(event) for event in events)
        else:
            [choice] = json.loads(text)["choices"]
            assert len(choice["logprobs"]["tokens"]) == 8000
