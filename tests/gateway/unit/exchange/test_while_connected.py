"""The work for a request is cancelled when its client disconnects."""

import asyncio

import pytest

from services.gateway.adapters.http.exchange.while_connected import Client, while_connected

SECONDS = 60


def nothing() -> None:
    return None


async def test_work_begins_at_once_and_its_result_is_kept() -> None:
    client, done = Client(nothing), []
    with while_connected(client):
        done.append("begun")
        await asyncio.sleep(0)
        done.append("ended")
    assert done == ["begun", "ended"]


async def test_the_connection_reads_on_so_that_the_clients_end_is_noticed() -> None:
    read = []
    with while_connected(Client(lambda: read.append("on"))):
        assert read == ["on"]


async def test_work_is_cancelled_when_the_client_goes_away_and_the_task_goes_on() -> None:
    client, task = Client(nothing), asyncio.current_task()
    assert task is not None
    was_cancelled = False
    async with asyncio.timeout(SECONDS):
        with while_connected(client):
            asyncio.get_running_loop().call_soon(client.has_gone)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                was_cancelled = True
                raise
    assert was_cancelled
    assert not task.cancelling()


async def test_work_of_a_client_that_went_away_before_is_cancelled() -> None:
    client, task = Client(nothing), asyncio.current_task()
    assert task is not None
    client.has_gone()
    async with asyncio.timeout(SECONDS):
        with while_connected(client):
            await asyncio.Event().wait()
    assert not task.cancelling()


async def test_a_client_that_goes_away_later_cancels_nothing() -> None:
    client, task = Client(nothing), asyncio.current_task()
    assert task is not None
    with while_connected(client):
        pass
    client.has_gone()
    await asyncio.sleep(0)
    assert not task.cancelling()


async def test_an_error_of_the_work_is_raised() -> None:
    async def fail() -> None:
        with while_connected(Client(nothing)):
            await asyncio.sleep(0)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await fail()


async def test_the_task_itself_can_be_cancelled_while_the_client_is_there() -> None:
    async def serve() -> None:
        with while_connected(Client(nothing)):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_that_is_cancelled_as_its_client_goes_away_ends_cancelled() -> None:
    client = Client(nothing)

    async def serve() -> None:
        with while_connected(client):
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    client.has_gone()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
