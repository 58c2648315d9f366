"""A full gateway refuses requests in the HTTP connection, when it has read only their headers.
These quick refusals must equal the ASGI application's refusals.
"""

import asyncio
import gc
import json
import logging
import re
import socket
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.telemetry.tracing import configure_tracing
from services.gateway.options.tenants.core.tenant import Tenant
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.options.tenants.tenant_fleet import num_waiting
from tests.gateway.raw_http import post, post_head
from tests.gateway.serving import DEADLINE_SECONDS, Serving, serving, until
from tests.gateway.streams import Stream

KEY, OTHER = "Authorization: Bearer floods", "Authorization: Bearer quiet"
FULL = {"api_keys": ("floods", "quiet"), "max_num_waiting_per_tenant": 1}
PATH, BODY = "/v1/completions", b'{"prompt": "a"}'
APPLICATIONS = "Connection: close"
"""The ASGI application refuses requests with this header. The connection refuses others."""


async def filled(served: Serving) -> list[Stream]:
    """Fills a gateway, so that it refuses further requests: one request runs, one waits at the
    scheduler, and one waits at the gateway.
    """
    headers = {"Authorization": "Bearer floods"}
    streams = [Stream(served, headers=headers) for _ in range(2)]
    await until(lambda: len(served.scheduler.adds) == 2)
    streams.append(Stream(served, headers=headers))
    await until(lambda: num_waiting(served.gateway.fleet, "key-1") == 1)
    return streams


def end(streams: list[Stream]) -> None:
    for stream in streams:
        stream.task.cancel()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, served: Serving) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", served.http.base_url.port))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(DEADLINE_SECONDS):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.rstrip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await self._reader.readexactly(int(headers["content-length"]))
        return int(status.split(" ")[1]), headers, body

    def end(self) -> None:
        """Ends sending. Answers can still be read."""
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()


def has_answer(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
    except BlockingIOError:
        return False


async def received(client: socket.socket) -> bytes:
    """Waits for data and returns it. The event loop iterates the whole time, without sleeping."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not has_answer(client):  # noqa: ASYNC110 - each turn counts
            await asyncio.sleep(0)
    return client.recv(2**16)


async def asked(served: Serving, *headers: str) -> tuple[int, dict[str, str], bytes]:
    client = await Client.of(served)
    client.send(post(PATH, BODY, KEY, *headers))
    answer = await client.answer()
    client.close()
    return answer


def alike(text: object) -> str:
    """The text without the parts in which two equal requests differ: times and random ids."""
    return re.sub(r"[0-9a-f]{24,32}|\b[0-9]+\.[0-9e.-]+|:[0-9]{4,5}\b", "*", str(text))


async def counts(served: Serving) -> dict[str, float]:
    lines = (await served.metrics()).splitlines()
    pattern = r"(\S*(?:rejections|refusals|http_requests|duration_seconds_count)\S*) (\S+)"
    matches = [re.fullmatch(pattern, line) for line in lines if "/metrics" not in line]
    return {match[1]: float(match[2]) for match in matches if match is not None}


async def test_a_refusal_of_the_connection_is_as_one_of_the_application(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both refusals have the same status, headers, body, metrics, access log and spans."""
    caplog.set_level(logging.INFO)
    exporter = InMemorySpanExporter()
    tracing = configure_tracing("gateway", "", 1.0, exporter=exporter)
    scheduler = FakeScheduler(permits=0, max_num_seqs=1)
    async with serving(model, scheduler, tracing=tracing, **FULL) as served:
        streams = await filled(served)
        seen = []
        for further in ((), (APPLICATIONS,)):
            before = await counts(served)
            exporter.clear()
            caplog.clear()
            status, headers, body = await asked(served, *further)
            await until(lambda: any(" 429" in one.message for one in caplog.records))
            after = await counts(served)
            changed = {name: n - before.get(name, 0) for name, n in after.items()}
            lines = [vars(one) for one in caplog.records if " 429" in one.message]
            spans = [
                (span.name, sorted(span.attributes or {}), span.status.status_code)
                for span in exporter.get_finished_spans()
            ]
            assert headers.pop("connection", "close") == "close"
            fields = ("message", "tenant", "error", "protocol")
            seen.append(
                (
                    status,
                    sorted(headers),
                    json.loads(body),
                    {name: n for name, n in changed.items() if n},
                    [alike([line[field] for field in fields]) for line in lines],
                    sorted(map(str, spans)),
                )
            )
        end(streams)
    quick, applications = seen
    assert quick == applications
    status, headers, body, changed, lines, spans = quick
    assert (status, body["error"]["code"]) == (429, "tenant_queue_full")
    assert {"retry-after", "retry-after-ms", "x-request-id", "x-trace-id", "date"} <= {*headers}
    assert 'stepwell_tenant_refusals_total{model_name="tiny",reason="tenant_queue_full",' in str(
        changed
    )
    assert len(lines) == 1
    assert len(spans) == 2


async def test_the_names_and_the_trace_that_a_client_gives_are_those_of_its_refusal(
    model: Path,
) -> None:
    async with serving(model, FakeScheduler(permits=0, max_num_seqs=1), **FULL) as served:
        streams = await filled(served)
        trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
        traceparent = f"traceparent: 00-{trace_id}-00f067aa0ba902b7-00"
        _, headers, _ = await asked(served, "X-Request-Id: mine", traceparent)
        assert (headers["x-request-id"], headers["x-trace-id"]) == ("mine", trace_id)
        end(streams)


async def test_a_connection_is_used_on_after_refusals(model: Path) -> None:
    async with serving(model, FakeScheduler(permits=0, max_num_seqs=1), **FULL) as served:
        streams = await filled(served)
        client = await Client.of(served)
        refused, version = (
            post(PATH, BODY, KEY),
            b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
        )
        client.send(refused + version + refused + refused + version)
        assert [(await client.answer())[0] for _ in range(5)] == [429, 200, 429, 429, 200]
        client.send(post_head(PATH, len(BODY), KEY))
        assert (await client.answer())[0] == 429
        client.send(BODY + version)  # belongs to the refused request before
        assert (await client.answer())[0] == 200
        client.close()
        end(streams)


async def test_clients_that_were_refused_may_send_a_last_request_and_their_end_at_once(
    model: Path,
) -> None:
    """With 40 refusals at once, some are still delayed when the client has ended sending."""
    async with serving(model, FakeScheduler(permits=0, max_num_seqs=1), **FULL) as served:
        streams = await filled(served)
        clients = [await Client.of(served) for _ in range(40)]
        for client in clients:
            client.send(post(PATH, BODY, KEY))
        assert {(await client.answer())[0] for client in clients} == {429}
        for client in clients:
            client.send(post(PATH, BODY, KEY))
            client.end()
        assert {(await client.answer())[0] for client in clients} == {429}
        for client in clients:
            client.close()
        end(streams)


async def test_another_request_is_answered_before_most_of_a_burst_of_those_just_refused(
    model: Path,
) -> None:
    """80 connections that were refused once send another request at the same time. After them, a
    new connection sends a request.
    """
    async with serving(model, FakeScheduler(permits=0, max_num_seqs=1), **FULL) as served:
        streams = await filled(served)
        address = ("127.0.0.1", served.http.base_url.port)
        *flood, other = [socket.create_connection(address) for _ in range(81)]
        num_before = 0
        for _ in range(2):
            gc.collect()  # collects now, to not prolong an iteration below
            for client in flood:
                client.sendall(post(PATH, BODY, KEY))
            other.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await received(other)).startswith(b"HTTP/1.1 200 ")
            num_before = sum(map(has_answer, flood))
            refusals = [await received(client) for client in flood]
            assert {refusal[:13] for refusal in refusals} == {b"HTTP/1.1 429 "}
        assert num_before < 10
        for client in (*flood, other):
            client.close()
        end(streams)


async def test_of_a_burst_as_many_are_let_in_as_fit_before_the_first_is_read(model: Path) -> None:
    """Of ten requests that arrive, seven are refused at once, although no body has arrived yet."""
    scheduler = FakeScheduler(permits=0, max_num_seqs=1)
    settings = FULL | {"max_num_waiting_per_tenant": 4}
    async with serving(model, scheduler, **settings) as served:
        streams = await filled(served)
        clients = [await Client.of(served) for _ in range(10)]
        for client in clients:
            client.send(post_head(PATH, 1000, KEY))
        answers = [asyncio.create_task(client.answer()) for client in clients]
        await until(lambda: sum(task.done() for task in answers) == 7)
        assert {task.result()[0] for task in answers if task.done()} == {429}
        arrivals = served.gateway.fleet.arrivals
        assert arrivals.num(Tenant("key-1")) == 3
        for task, client in zip(answers, clients, strict=True):
            task.cancel()
            client.close()
        await until(lambda: arrivals.num(Tenant("key-1")) == 0)
        end(streams)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Content-Encoding: gzip",), 415),
        (("X-Request-Timeout: soon",), 400),
        (("Host: elsewhere",), 400),
        (("Content-Length: 9999999999",), 400),
    ],
)
async def test_what_has_room_and_is_refused_for_another_reason_counts_no_more(
    model: Path, headers: tuple[str, ...], status: int
) -> None:
    async with serving(model, FakeScheduler(), **FULL) as served:
        assert (await asked(served, *headers))[0] == status
        assert served.gateway.fleet.arrivals.num(Tenant("key-1")) == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Authorization: Bearer nobody",), 401),
        (("Authorization: Bearer floods", "X-Request-Timeout: soon"), 400),
        (("Authorization: Bearer floods", "Host: elsewhere"), 400),
        (("Authorization: Bearer floods", "Content-Encoding: gzip"), 429),
    ],
)
async def test_a_full_server_says_what_else_is_wrong_first(
    model: Path, headers: tuple[str, ...], status: int
) -> None:
    async with serving(model, FakeScheduler(permits=0, max_num_seqs=1), **FULL) as served:
        streams = await filled(served)
        client = await Client.of(served)
        client.send(post(PATH, BODY, *headers))
        assert (await client.answer())[0] == status
        client.close()
        end(streams)
