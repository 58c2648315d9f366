"""A gateway that stops refuses new requests, and ends when no request runs."""

import asyncio
from pathlib import Path

import grpc
import httpx

from tests.gateway.serving import DEADLINE_SECONDS, serving, until
from tests.slowness import slowness


async def stop_seconds(model: Path) -> float:
    async with serving(model) as served:
        assert (await served.http.get("/health")).status_code == 200
        loop = asyncio.get_running_loop()
        began = loop.time()
        await served.gateway.drain()
        return loop.time() - began


async def test_nothing_is_waited_for_if_nothing_runs(model: Path) -> None:
    """Takes the shortest of five stops, because the others may include waits for a processor."""
    assert min([await stop_seconds(model) for _ in range(5)]) < 0.08 * slowness()


async def test_clients_connect_elsewhere_from_the_beginning_of_a_drain(model: Path) -> None:
    """Idle HTTP connections end at once, so that clients' connection pools do not use them again.
    gRPC channels disconnect, too.
    """
    async with serving(model, drain_seconds=DEADLINE_SECONDS) as served:
        url = httpx.URL(served.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
        await served.channel.channel_ready()
        with served.gateway.gate.enter():  # a running request
            drained = asyncio.create_task(served.gateway.drain())
            assert await asyncio.wait_for(reader.read(), DEADLINE_SECONDS / 2) == b""
            async with asyncio.timeout(DEADLINE_SECONDS / 2):
                state = served.channel.get_state()
                while state is grpc.ChannelConnectivity.READY:
                    await served.channel.wait_for_state_change(state)
                    state = served.channel.get_state()
            assert not drained.done()
        await drained
        writer.close()
        await writer.wait_closed()


async def test_a_first_request_that_comes_during_a_drain_gets_an_answer(model: Path) -> None:
    """A proxy may connect long before it sends the first request."""
    async with serving(model, drain_seconds=DEADLINE_SECONDS) as served:
        url = httpx.URL(served.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        with served.gateway.gate.enter():  # a running request
            drained = asyncio.create_task(served.gateway.drain())
            await until(lambda: not served.gateway.gate.is_open)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = (await asyncio.wait_for(reader.read(), DEADLINE_SECONDS / 2)).lower()
            assert answer.startswith(b"http/1.1 503")
            assert b"connection: close" in answer
        await drained
        writer.close()
        await writer.wait_closed()
