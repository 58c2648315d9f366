"""The gateway's HTTP and gRPC APIs over TLS behave as without TLS. Limits on connections also apply
before the handshake has ended.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvloop
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc

from tests.certificates import LOOPBACK, Authority, Files
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.raw_http import post, post_head, unchunked
from tests.gateway.serving import Serving, serving, until

SECONDS = 60.0
BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def own(authority: Authority, tmp_path: Path) -> Files:
    return Files(tmp_path / "own").write(authority.issue(*LOOPBACK), authority)


@pytest.fixture
def client(authority: Authority, tmp_path: Path) -> Files:
    return Files(tmp_path / "client").write(authority.issue("client.example"), authority)


@asynccontextmanager
async def serving_tls(
    model: Path, own: Files, *schedulers: FakeScheduler, mutual: bool = False, **settings: Any
) -> AsyncIterator[Serving]:
    """A gateway with TLS. The client `served.http` trusts the gateway's certificate."""
    async with serving(
        model, *schedulers, tls=own.tls(mutual=mutual), http_verify=trusting(own), **settings
    ) as served:
        yield served


def trusting(own: Files) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=own.ca)


def host_and_port(served: Serving) -> tuple[str, int]:
    host, port = served.base_url.removeprefix("https://").split(":")
    return host, int(port)


async def connect(
    served: Serving, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = host_and_port(served)
    name = None if context is None else "localhost"
    return await asyncio.open_connection(host, port, ssl=context, server_hostname=name)


async def raw(served: Serving, own: Files, request: bytes) -> bytes:
    reader, writer = await connect(served, trusting(own))
    writer.write(request)
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()
    return answer


def num_connections(served: Serving) -> int:
    return len(served.gateway._http.connections)


async def test_answers_are_those_of_plain_http(model: Path, own: Files) -> None:
    async with serving(model, FakeScheduler()) as plain:
        expected = (await plain.http.post("/v1/completions", json=BODY)).json()["choices"]
    async with serving_tls(model, own, FakeScheduler()) as served:
        answer = await served.http.post("/v1/completions", json=BODY)
        assert answer.json()["choices"] == expected
        http_client = DefaultAsyncHttpxClient(verify=trusting(own))
        options = {"api_key": "none", "max_retries": 0, "http_client": http_client}
        async with AsyncOpenAI(base_url=f"{served.base_url}/v1", **options) as openai:
            stream = await openai.completions.create(
                model="tiny", prompt=[5, 6, 7], max_tokens=8, seed=3, stream=True
            )
            text = "".join([event.choices[0].text async for event in stream if event.choices])
        assert text == expected[0]["text"]


async def test_a_body_of_megabytes_arrives(model: Path, own: Files) -> None:
    async with serving_tls(model, own) as served:
        prompts = {"prompt": ["word " * 100_000] * 4, "max_tokens": 1}
        answer = await served.http.post("/v1/completions", json=prompts)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_a_refusal_before_the_request_is_whole_is_read(model: Path, own: Files) -> None:
    headers = "".join(f"x-{number}: y\r\n" for number in range(200))
    async with serving_tls(model, own) as served:
        answer = await raw(served, own, f"GET / HTTP/1.1\r\n{headers}\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"there are more than 100 headers" in answer


async def test_slow_headers_are_refused(model: Path, own: Files) -> None:
    async with serving_tls(model, own, receive_timeout_seconds=0.3) as served:
        answer = await raw(served, own, b"GET / HTTP/1.1\r\nx:")
        await until(lambda: num_connections(served) == 0)
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_slow_body_is_read(model: Path, own: Files) -> None:
    body = json.dumps(BODY).encode()
    async with serving_tls(model, own) as served:
        reader, writer = await connect(served, trusting(own))
        writer.write(post_head("/v1/completions", len(body), "Connection: close"))
        for byte in body:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(SECONDS):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_requests_before_the_first_answer_are_answered_in_order(
    model: Path, own: Files
) -> None:
    bodies = [json.dumps(BODY | {"seed": seed}).encode() for seed in range(3)]
    requests = [post("/v1/completions", body) for body in bodies[:2]]
    requests.append(post("/v1/completions", bodies[2], "Connection: close"))
    async with serving_tls(model, own) as served:
        answer = await raw(served, own, b"".join(requests))
        expected = [
            (await served.http.post("/v1/completions", content=body, headers=JSON)).json()
            for body in bodies
        ]
    texts = [
        json.loads(part.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
        for part in answer.split(b"HTTP/1.1 200 OK")[1:]
    ]
    assert texts == [each["choices"][0]["text"] for each in expected]


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("how", ["close", "abort", "eof"])
async def test_a_client_that_goes_away_aborts(
    model: Path, own: Files, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Over TLS, a client that ends only its sending side counts as disconnected."""
    async with serving_tls(model, own, FakeScheduler(permits=2)) as served:
        reader, writer = await connect(served, trusting(own))
        writer.write(post("/v1/completions", json.dumps(BODY | {"stream": True}).encode()))
        await reader.readuntil(b"data: ")
        if how == "close":
            writer.close()
        elif how == "abort":
            writer.transport.abort()
        else:
            writer.transport.get_extra_info("socket").shutdown(socket.SHUT_WR)
        await until(lambda: served.scheduler.num_running == 0)
        await until(lambda: num_connections(served) == 0)
        writer.close()
    assert "eof_received" not in caplog.text


LONG = {"max_model_len": 400_000, "max_request_tokens": 400_000, "tokens_per_step": 500}


def small_socket(served: Serving) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(host_and_port(served))
    return client


async def ask_for_much(
    served: Serving, own: Files, num_tokens: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(
        sock=small_socket(served), ssl=trusting(own), server_hostname="localhost", limit=1024
    )
    body = BODY | {
        "max_tokens": num_tokens,
        "logprobs": 5,
        "stream": True,
        "return_token_ids": True,
    }
    writer.write(post("/v1/completions", json.dumps(body).encode()))
    return reader, writer


async def test_a_client_that_stops_reading_is_cut(model: Path, own: Files) -> None:
    async with serving_tls(model, own, FakeScheduler(**LONG), reader_timeout_seconds=0.5) as served:
        reader, writer = await ask_for_much(served, own, 300_000)
        await reader.readuntil(b"data: ")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: num_connections(served) == 0)
        await until(lambda: served.scheduler.num_running == 0)
        writer.transport.abort()


async def test_a_client_that_reads_slowly_gets_all(model: Path, own: Files) -> None:
    """The client reads about 100 KB in each 0.5 s, and the gateway requires at least 16 KiB."""
    async with serving_tls(model, own, FakeScheduler(**LONG), reader_timeout_seconds=0.5) as served:
        reader, writer = await ask_for_much(served, own, 6_000)
        answer = b""
        async with asyncio.timeout(60):
            while b"[DONE]" not in answer[-200:]:
                answer += await reader.read(8_192)
                await asyncio.sleep(0.02)
        writer.transport.abort()
    lines = unchunked(answer).split(b"\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 6_000


async def test_a_client_that_never_begins_the_handshake_is_dropped(model: Path, own: Files) -> None:
    async with serving_tls(model, own, receive_timeout_seconds=0.3) as served:
        reader, writer = await connect(served, None)
        await until(lambda: num_connections(served) == 1)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        assert num_connections(served) == 0
        writer.close()


async def test_half_a_handshake_is_dropped(model: Path, own: Files) -> None:
    async with serving_tls(model, own, receive_timeout_seconds=0.3) as served:
        reader, writer = await connect(served, None)
        writer.write(b"\x16\x03\x01\x02\x00\x01")
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_handshake_that_came_before_it_was_accepted_goes_on(
    model: Path, own: Files, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """On a busy server, data arrives before the connection is accepted. uvloop reads such data in
    the iteration in which it accepts the connection.
    """

    async def handshake() -> bytes:
        async with serving_tls(model, own) as served:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = trusting(own).wrap_bio(incoming, outgoing, server_hostname="localhost")
            with pytest.raises(ssl.SSLWantReadError):
                tls.do_handshake()
            with socket.create_connection(host_and_port(served)) as client:
                client.sendall(outgoing.read())  # the event loop has not accepted the connection
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(SECONDS / 4):
                    return await loop.sock_recv(client, 3)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        answer = runner.run(handshake())
    assert answer == b"\x16\x03\x03"  # a record of a handshake, TLS 1.2 or later


async def test_stalled_handshakes_make_room_for_others(model: Path, own: Files) -> None:
    # The receive timeout is long, so that no connection ends because of a slow handshake.
    settings = {"max_connections": 8, "receive_timeout_seconds": 600.0}
    async with serving_tls(model, own, **settings) as served:
        stalled = [await connect(served, None) for _ in range(30)]
        answer = await served.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        assert num_connections(served) <= 8
        for reader, _ in stalled[:20]:
            async with asyncio.timeout(SECONDS):
                with suppress(ConnectionError):
                    await reader.read()
        for _, writer in stalled:
            writer.close()
        await until(lambda: num_connections(served) == 1)


async def test_stopping_does_not_wait_for_handshakes(model: Path, own: Files) -> None:
    async with serving_tls(model, own, receive_timeout_seconds=600.0) as served:
        _, writer = await connect(served, None)
        await until(lambda: num_connections(served) == 1)
        async with asyncio.timeout(SECONDS):
            await served.gateway.drain()
        writer.close()


async def test_plain_http_is_no_handshake(
    model: Path, own: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_tls(model, own) as served:
        reader, writer = await connect(served, None)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert b"HTTP/1.1 200" not in answer
        writer.close()
    assert "ended or refused: the TLS handshake failed: http request (1)" in caplog.text


async def test_tls_at_a_plain_port_fails(model: Path, own: Files) -> None:
    async with serving(model) as served:
        port = int(served.base_url.rpartition(":")[2])
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", port, ssl=trusting(own))
        assert (await served.http.get("/health")).status_code == 200


async def test_a_new_certificate_serves_new_connections(model: Path, own: Files) -> None:
    async with serving_tls(model, own, FakeScheduler(permits=2)) as served:
        reader, writer = await connect(served, trusting(own))
        body = json.dumps(BODY | {"stream": True}).encode()
        writer.write(post("/v1/completions", body, "Connection: close"))
        await reader.readuntil(b"data: ")
        new = Authority("new")
        own.write(new.issue(*LOOPBACK), new)
        served.gateway.parts.tls.watch.look()
        context = trusting(own)
        served.scheduler.run_freely()
        async with httpx.AsyncClient(verify=context, base_url=served.base_url) as http:
            assert (await http.get("/health")).status_code == 200
        credentials = grpc.ssl_channel_credentials(own.ca.read_bytes())
        async with grpc.aio.secure_channel(served.grpc_address, credentials) as channel:
            assert await generate(channel) == 8
        async with asyncio.timeout(SECONDS):
            assert b"[DONE]" in await reader.read()
        writer.close()


async def test_a_bad_replacement_changes_nothing(
    model: Path, own: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_tls(model, own) as served:
        own.cert.write_bytes(own.cert.read_bytes()[:100])
        served.gateway.parts.tls.watch.look()
        async with httpx.AsyncClient(verify=trusting(own), base_url=served.base_url) as http:
            metrics = (await http.get("/metrics")).text
    labels = '{certificate="internal",service="gateway"}'
    assert f"stepwell_tls_files_usable{labels} 0.0" in metrics
    assert "the previous internal certificate stays in use" in caplog.text


async def generate(channel: grpc.aio.Channel) -> int:
    request = gateway_pb2.GenerateRequest(
        token_ids={"ids": [5, 6, 7]}, sampling={"max_tokens": 8}, ignore_eos=True
    )
    stub = gateway_pb2_grpc.InferenceStub(channel)
    async with asyncio.timeout(SECONDS):
        return sum([len(message.token_ids) async for message in stub.Generate(request)])


async def test_with_an_authority_for_clients_each_shows_a_certificate(
    model: Path, own: Files, client: Files
) -> None:
    async with serving_tls(model, own, mutual=True) as served:
        context = client.client_context()
        async with httpx.AsyncClient(verify=context, base_url=served.base_url) as http:
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        with pytest.raises(httpx.TransportError):
            await served.http.get("/health")
        ca, key, chain = (path.read_bytes() for path in (client.ca, client.key, client.cert))
        with_one = grpc.ssl_channel_credentials(ca, key, chain)
        async with grpc.aio.secure_channel(served.grpc_address, with_one) as channel:
            assert await generate(channel) == 8
        without = grpc.ssl_channel_credentials(ca)
        async with grpc.aio.secure_channel(served.grpc_address, without) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_grpc_client_that_never_begins_the_handshake_is_dropped(
    model: Path, own: Files
) -> None:
    async with serving_tls(model, own, receive_timeout_seconds=0.3) as served:
        host, _, port = served.grpc_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
