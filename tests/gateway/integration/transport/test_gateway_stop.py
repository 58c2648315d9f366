"""A gateway without requests ends at once. Otherwise it refuses new requests, and ends after the
running ones.
"""

import asyncio
from pathlib import Path

import grpc
import httpx

from tests.gateway.serving import DEADLINE_SECONDS, serving, until
from tests.slowness import slowness


async def stop_seconds(model: Path) -> float:
    """The time to stop a gateway that has an open, unused connection, in seconds."""
    async with serving(model) as served:
        assert (await served.http.get("/health")).status_code == 200
        loop = asyncio.get_running_loop()
        began = loop.time()
        await served.gateway.drain()
        return loop.time() - began


async def test_nothing_is_waited_for_if_nothing_runs(model: Path) -> None:
    """Measures the quickest of five, since the others may have waited for a processor."""
    assert min([await stop_seconds(model) for _ in range(5)]) < 0.08 * slowness()


async def test_clients_connect_elsewhere_from_the_beginning_of_a_drain(model: Path) -> None:
    """An idle connection ends at once, so that a client's connection pool does not go on sending
    requests here. A gRPC channel finds no listener.
    """
    async with serving(model, drain_seconds=DEADLINE_SECONDS) as served:
        url = httpx.URL(served.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
        await served.channel.channel_ready()
        with served.gateway.gate.enter():  # a request that runs
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
    """A proxy connects as soon as its client does. The request follows later."""
    async with serving(model, drain_seconds=DEADLINE_SECONDS) as served:
        url = httpx.URL(served.base_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        with served.gateway.gate.enter():  # a request that runs
            drained = asyncio.create_task(served.gateway.drain())
            await until(lambda: not served.gateway.gate.is_open)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = (await asyncio.wait_for(reader.read(), DEADLINE_SECONDS / 2)).lower()
            assert answer.startswith(b"http/1.1 503")
            assert b"connection: close" in answer
        await drained
        writer.close()
        await writer.wait_closed()
