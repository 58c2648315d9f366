"""Work that its client's end cancels, in the task that serves the client."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from services.gateway.adapters.http.while_connected import while_connected

SECONDS = 60


class Client:
    """Says that it has gone, when it has."""

    def __init__(self) -> None:
        self.has_gone = asyncio.Event()
        self.is_heard = False

    async def receive(self) -> MutableMapping[str, Any]:
        self.is_heard = True
        try:
            await self.has_gone.wait()
        finally:
            self.is_heard = False
        return {"type": "http.disconnect"}


async def test_work_begins_at_once_and_its_result_is_kept() -> None:
    client, done = Client(), []
    async with while_connected(client.receive):
        assert not client.is_heard, "the event loop has not turned"
        done.append("begun")
        await asyncio.sleep(0)
        done.append("ended")
    assert done == ["begun", "ended"]
    assert not client.is_heard


async def test_work_is_cancelled_when_the_client_goes_away_and_the_task_goes_on() -> None:
    client, task = Client(), asyncio.current_task()
    assert task is not None
    was_cancelled = False
    async with asyncio.timeout(SECONDS):
        async with while_connected(client.receive):
            client.has_gone.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                was_cancelled = True
                raise
    assert was_cancelled
    assert not task.cancelling()


async def test_an_error_of_the_work_is_raised() -> None:
    client = Client()

    async def fail() -> None:
        async with while_connected(client.receive):
            await asyncio.sleep(0)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await fail()
    assert not client.is_heard


async def test_the_task_itself_can_be_cancelled_while_the_client_is_there() -> None:
    client = Client()

    async def serve() -> None:
        async with while_connected(client.receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    while not client.is_heard:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not client.is_heard


async def test_a_task_that_is_cancelled_as_its_client_goes_away_ends_cancelled() -> None:
    client = Client()

    async def serve() -> None:
        async with while_connected(client.receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    while not client.is_heard:  # noqa: ASYNC110
        await asyncio.sleep(0)
    client.has_gone.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
