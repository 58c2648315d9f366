"""The gateway's limits on HTTP connections and requests, and which requests are still answered."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from services.common.process.settings import SettingError, parse_settings
from services.common.rpc.message_limits import MAX_MESSAGE_BYTES
from services.gateway.adapters.http.transport.connection import MAX_PIPELINED
from services.gateway.settings import GatewaySettings
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.raw_http import post, post_head
from tests.gateway.serving import Serving, serving, until

BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 3}
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def connected(
    served: Serving,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = served.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**24)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def test_a_body_cannot_be_larger_than_a_message_to_a_replica(model: Path) -> None:
    """A request that no message can carry would end the session with each replica, again and again,
    and so interrupt all other requests.
    """
    flags = ["--model", str(model), "--max-body-bytes"]
    most = parse_settings(GatewaySettings, "gateway", [*flags, str(MAX_MESSAGE_BYTES)], {})
    assert most.max_body_bytes == MAX_MESSAGE_BYTES
    with pytest.raises(SettingError, match="--max-body-bytes must be from 1024 to 67108864"):
        parse_settings(GatewaySettings, "gateway", [*flags, str(MAX_MESSAGE_BYTES + 1)], {})


async def answer_to(served: Serving, *pieces: bytes) -> bytes:
    async with connected(served) as (reader, writer), asyncio.timeout(60):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b"reset"


def has_no_connection(served: Serving) -> bool:
    return len(served.gateway._http.connections) == 0


async def test_silent_and_slow_connections_are_ended(model: Path):
    async with serving(model, receive_timeout_seconds=0.1) as served:
        began = time.monotonic()
        silent, headers, body = await asyncio.gather(
            answer_to(served),
            answer_to(served, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "),
            answer_to(served, post_head("/v1/completions", 100), b'{"prompt": '),
        )
        assert time.monotonic() - began < 8, "the usual time is 10 s"
        assert silent == b""
        assert headers.startswith(b"HTTP/1.1 408 ")
        assert body.startswith(b"HTTP/1.1 408 ")
        assert served.gateway.gate.inside == 0
        await until(lambda: has_no_connection(served))


async def test_a_connection_without_a_request_is_ended(model: Path):
    async with serving(model, http_keep_alive_seconds=0.2) as served:
        answer = await answer_to(served, GET)
        assert answer.startswith(b"HTTP/1.1 200 ")
        # The connection also ends if the request was refused before its body had arrived.
        refused = await answer_to(served, post_head("/nowhere", 4), b"{", b"} ", b" ")
        assert refused.startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 500_000,
        b"GET /" + b"x" * 500_000,
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: 1\r\n" % n for n in range(150)),
    ],
)
async def test_large_headers_are_not_kept(served: Serving, head: bytes):
    assert (await answer_to(served, head)).startswith(b"HTTP/1.1 431 ")


def chunked(*end: bytes) -> bytes:
    """A request with a chunked body, whose last chunk is followed by `end`."""
    head = post_head("/v1/completions", 0, "Transfer-Encoding: chunked", "Connection: close")
    body = json.dumps(BODY).encode()
    head = head.replace(b"Content-Length: 0\r\n", b"")
    return b"".join((head, b"%x\r\n%b\r\n" % (len(body), body), *end))


@pytest.mark.parametrize("end", [b"0\r\nX: ", b"0;x="])
async def test_large_trailers_are_not_kept(served: Serving, end: bytes):
    answer = await answer_to(served, chunked(end, b"x" * 500_000))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert served.gateway.gate.inside == 0


async def test_a_trailer_does_not_count_as_a_header(served: Serving):
    answer = await answer_to(served, chunked(b"0\r\nX-Request-Id: of-the-trailer\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"of-the-trailer" not in answer


JAVA = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
"""The headers by which Java's HttpClient offers HTTP/2 in each request without TLS."""


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("cut", [1, 2**20])
async def test_a_request_that_offers_an_upgrade_is_read_whole(
    served: Serving, is_chunked: bool, cut: int
):
    body = json.dumps(BODY).encode()
    head = post_head("/v1/completions", len(body), *JAVA)
    if is_chunked:
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    last = post("/v1/completions", json.dumps(BODY).encode(), "Connection: close")
    request = head + body + head + body + last
    async with connected(served) as (reader, writer), asyncio.timeout(60):
        for at in range(0, len(request), cut):
            writer.write(request[at : at + cut])
            await asyncio.sleep(0)
        answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200 OK") == 3


async def test_a_body_of_unknown_length_after_an_offered_upgrade_is_refused(
    served: Serving, caplog: pytest.LogCaptureFixture
):
    head = post_head("/v1/completions", 0, *JAVA)
    head = head.replace(b"Content-Length: 0", b"Transfer-Encoding: gzip")
    assert (await answer_to(served, head)).startswith(b"HTTP/1.1 400 ")
    assert "Fatal error" not in caplog.text


async def test_what_is_no_http_is_refused(served: Serving):
    assert (await answer_to(served, b"\x16\x03\x01\x02\x00")).startswith(b"HTTP/1.1 400 ")


async def test_idle_connections_make_room_and_served_ones_do_not(model: Path):
    scheduler = FakeScheduler(permits=0)
    async with serving(model, scheduler, max_connections=2) as served:
        body = json.dumps(BODY).encode()
        async with connected(served) as (idle, _), connected(served) as (first, first_writer):
            first_writer.write(post("/v1/completions", body))
            await until(lambda: scheduler.num_running == 1)
            async with connected(served) as (second, second_writer):
                second_writer.write(post("/v1/completions", body))
                await until(lambda: scheduler.num_running == 2)
                assert await idle.read() == b""
                assert (await answer_to(served, GET)).startswith(b"HTTP/1.1 503 ")
                scheduler.run_freely()
                for reader in (first, second):
                    assert (await reader.readuntil(b"\r\n")) == b"HTTP/1.1 200 OK\r\n"


async def test_a_flood_of_requests_on_one_connection_is_cut(served: Serving):
    answer = await answer_to(served, GET * 5000)
    assert answer == b"reset" or answer.count(b"HTTP/1.1 200 ") < 100
    assert (await served.http.get("/health")).status_code == 200


async def test_a_body_in_the_smallest_pieces_is_read(served: Serving):
    body = json.dumps(BODY | {"prompt": "a" * 50}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = post_head("/v1/completions", 0, "Transfer-Encoding: chunked", "Connection: close")
    head = head.replace(b"Content-Length: 0\r\n", b"")
    assert (await answer_to(served, head + chunks)).startswith(b"HTTP/1.1 200 ")


async def test_a_place_is_taken_before_the_body_is_read(model: Path):
    async with (
        serving(model, max_concurrent_requests=1) as served,
        connected(served) as (_, first),
        connected(served) as (reader, writer),
    ):
        first.write(post_head("/v1/completions", 4_000_000))
        await until(lambda: served.gateway.gate.inside == 1)
        for path in ("/v1/completions", "/tokenize"):
            writer.write(post(path, b"{}"))
            async with asyncio.timeout(20):
                status = await reader.readuntil(b"\r\n")
                await reader.readuntil(b"}}")
            assert status.startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
async def test_only_plain_json_is_read(served: Serving, headers: dict[str, str]):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = await served.http.post(path, content=b'{"prompt": "a"}', headers=headers)
        assert answer.status_code == 415
    assert served.scheduler.adds == []


async def test_another_sites_name_is_not_answered_on_loopback(served: Serving):
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example"):
        answer = await served.http.get("/v1/models", headers={"Host": host})
        assert answer.status_code == 421
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "192.168.0.9"):
        answer = await served.http.get("/v1/models", headers={"Host": host})
        assert answer.status_code == 200, host
    twice = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n"
    assert (await answer_to(served, twice + b"Connection: close\r\n\r\n")).startswith(
        b"HTTP/1.1 400 "
    )


async def test_names_can_be_allowed(model: Path):
    async with serving(model, allowed_hosts=("llm.example",)) as served:
        for host, status in (("llm.example:80", 200), ("localhost", 421), ("127.0.0.1", 200)):
            answer = await served.http.get("/health", headers={"Host": host})
            assert answer.status_code == status, host


async def test_pages_of_allowed_origins_may_read_answers(model: Path):
    asking = {
        "Origin": "https://chat.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with serving(model, allowed_origins=("https://chat.example",)) as served:
        allowed = await served.http.options("/v1/completions", headers=asking)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        other = asking | {"Origin": "https://evil.example"}
        refused = await served.http.options("/v1/completions", headers=other)
        assert refused.status_code == 400
        answer = await served.http.get("/v1/models/another", headers=asking)
        assert answer.status_code == 404
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"


async def test_without_allowed_origins_no_page_may(served: Serving):
    headers = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    answer = await served.http.options("/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_its_answer_without_chunks(served: Serving, stream: bool):
    body = json.dumps(BODY | {"stream": stream}).encode()
    answer = await answer_to(served, post("/v1/completions", body, version="1.0"))
    head, _, text = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    if stream:
        assert text.startswith(b"data: {")
        assert text.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(text)["choices"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_stopped_sending_gets_its_answer(served: Serving, stream: bool):
    scheduler = served.scheduler
    scheduler.permits = 0
    async with connected(served) as (reader, writer), asyncio.timeout(60):
        writer.write(post("/v1/completions", json.dumps(BODY | {"stream": stream}).encode()))
        await until(lambda: scheduler.num_running == 1)
        writer.write_eof()
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        scheduler.run_freely()
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert (b"[DONE]" if stream else b'"finish_reason":"length"') in answer


async def test_a_client_that_stops_sending_in_a_stream_gets_the_rest(served: Serving):
    """The client may end its sending side. If it closes the connection, the request is aborted even
    if no token arrives.
    """
    scheduler = served.scheduler
    body = json.dumps(BODY | {"stream": True, "max_tokens": 8}).encode()
    scheduler.answer = [70] * 8  # whole characters, which are not delayed
    for stays in (True, False):
        scheduler.permits = 2
        async with connected(served) as (reader, writer), asyncio.timeout(60):
            writer.write(post("/v1/completions", body))
            await reader.readuntil(b"data: {")
            writer.write_eof()
            await reader.readuntil(b"\n:\n\n")
            if stays:
                scheduler.run_freely()
                assert b"data: [DONE]" in await reader.read()
        await until(lambda: scheduler.num_running == 0)
    assert len(scheduler.aborts) == 1


async def test_a_client_that_leaves_ends_the_request_before_the_one_it_sent_last(
    served: Serving, caplog: pytest.LogCaptureFixture
):
    scheduler = served.scheduler
    body = json.dumps(BODY | {"stream": True, "max_tokens": 8}).encode()
    scheduler.answer = [70] * 8  # whole characters, which are not delayed
    scheduler.permits = 2
    async with connected(served) as (reader, writer), asyncio.timeout(60):
        writer.write(post("/v1/completions", body) + GET)
        await reader.readuntil(b"data: {")
    await until(lambda: scheduler.num_running == 0)
    assert len(scheduler.aborts) == 1
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/health", "/metrics"])
async def test_head_is_get_without_the_body(served: Serving, path: str):
    answer = await served.http.head(path)
    assert answer.status_code == 200
    assert answer.content == b""


async def test_models_may_end_in_a_slash(served: Serving):
    listed = (await served.http.get("/v1/models/")).json()
    assert listed["object"] == "list"


async def test_many_large_bodies_are_not_held_at_once(model: Path):
    num_held = 8
    async with serving(model, max_body_bytes=100_000, receive_timeout_seconds=0.2) as served:
        body = json.dumps({"prompt": "a" * 90_000}).encode()
        async with AsyncExitStack() as connections:
            for _ in range(num_held):
                _, hoarder = await connections.enter_async_context(connected(served))
                hoarder.write(post_head("/v1/completions", 95_000) + b'{"prompt": "')
            await until(lambda: served.gateway.gate.inside == num_held)
            request = post("/v1/completions", body, "Connection: close")
            answers = await asyncio.gather(*(answer_to(served, request) for _ in range(3)))
        # The requests waited for memory, which the first bodies occupied until their time limit.
        kinds = {answer[:13] for answer in answers}
        assert kinds <= {b"HTTP/1.1 400 ", b"HTTP/1.1 408 ", b"HTTP/1.1 429 "}


@pytest.mark.parametrize("num_models", [1, 2])
async def test_slow_bodies_of_one_tenant_do_not_keep_out_another(model: Path, num_models: int):
    """Tenant one sends as many large bodies as fit into the memory for bodies, and ends none."""
    settings = {"api_keys": ("one", "two"), "max_body_bytes": 100_000}
    further = [FakeScheduler(model_name="large")][: num_models - 1]
    async with (
        serving(model, FakeScheduler(), further=further, **settings) as served,
        AsyncExitStack() as connections,
    ):
        for _ in range(8):
            reader, slow = await connections.enter_async_context(connected(served))
            head = post_head("/v1/completions", 95_000, "Authorization: Bearer one")
            slow.write(GET + head + b'{"a": "')
            # The gateway has answered GET, so it has begun the next request.
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        body = {**BODY, "unknown": "a" * 90_000}
        headers = {"Authorization": "Bearer two"}
        async with asyncio.timeout(10):
            answer = await served.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200


def test_a_request_before_too_many_pipelined_ones_is_dropped_with_them(
    model: Path, caplog: pytest.LogCaptureFixture
):
    """The connection ends before the first request is answered, so its answer must not be written.
    uvloop, the gateway's event loop, raises an error for writes to a closed connection.
    """

    async def story() -> None:
        async with serving(model, FakeScheduler()) as served:
            async with connected(served) as (reader, writer):
                writer.write(post("/v1/completions", b"{}") * (MAX_PIPELINED + 2))
                assert await reader.read() == b""
            await until(lambda: len(served.gateway._http.connections) == 0)
            await served.http.get("/health")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
    assert not [record for record in caplog.records if record.exc_info]


def test_several_connections_are_accepted_in_a_turn_of_the_event_loop(model: Path) -> None:
    """By default uvloop, the gateway's event loop, accepts one connection in an iteration."""

    async def story() -> None:
        async with serving(model) as served:
            connections = served.gateway._http.connections
            address = served.http.base_url
            num_before, num_turns = len(connections), 0
            with ExitStack() as opened:
                for _ in range(64):  # connections wait in the kernel's queue until the loop runs
                    client = socket.create_connection((address.host, address.port))
                    opened.enter_context(client)
                while len(connections) < num_before + 64:
                    await asyncio.sleep(0)
                    num_turns += 1
            assert num_turns < 32

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
