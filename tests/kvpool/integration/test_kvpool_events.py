"""WatchEvents and MatchPrefix over gRPC. A watcher receives a snapshot of the cached hashes, then
each change; a slow watcher receives a new snapshot.
"""

import asyncio
from contextlib import aclosing

import grpc
import pytest
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.errors import Unavailable
from services.common.rpc import status
from services.kvpool.adapters.event_feed import MAX_UNREAD_HASHES, EventFeed
from services.kvpool.core.events import BlocksStored, EventBatch
from tests.kvpool import wire
from tests.kvpool.wire import Speaker, packed
from tests.kvpool.worked_examples import BLOCK_SIZE, hashes

IDLE_SECONDS = 1.0
"""An idle pool must send every event within this time."""


async def test_a_watcher_gets_a_snapshot_and_then_every_change(stub):
    speaker = await opened_speaker(stub, num_blocks=4)
    await speaker.transact(wire.admit(wire.admission(1, 8, path="ab")))
    watch = stub.WatchEvents(kvpool_pb2.WatchEventsRequest(pool_id="replica"))

    assert await read(watch) == batch(speaker, 1, stored("ab"), snapshot=True)
    await speaker.transact(wire.release(1), wire.admit(wire.admission(2, 8, path="xy")))
    # Request 2 gets block 3, which is free, and the block of "ab", which is evicted for it.
    assert await read(watch) == batch(speaker, 2, removed("ab", last=1), stored("xy"))
    await speaker.transact(wire.release(2))  # does not change the prefix index
    await speaker.transact(wire.reset())
    assert await read(watch) == batch(speaker, 3, cleared())
    watch.cancel()


async def test_an_idle_pool_keeps_nothing_back(stub):
    """A watcher gets a transaction's changes even if the transaction stream has ended since."""
    speaker = await opened_speaker(stub)
    watch = stub.WatchEvents(kvpool_pb2.WatchEventsRequest(pool_id="replica"))
    await read(watch)
    await speaker.transact(wire.admit(wire.admission(1, 8, path="ab")))
    await speaker.end()
    async with asyncio.timeout(IDLE_SECONDS):
        assert await watch.read() == batch(speaker, 1, stored("ab"))
    late = stub.WatchEvents(kvpool_pb2.WatchEventsRequest(pool_id="replica"))
    assert await read(late) == batch(speaker, 1, stored("ab"), snapshot=True)
    watch.cancel()
    late.cancel()


async def test_a_watcher_is_told_that_the_pool_begins_anew(stub):
    await opened_speaker(stub)
    watch = stub.WatchEvents(kvpool_pb2.WatchEventsRequest(pool_id="replica"))
    await read(watch)
    speaker = await opened_speaker(stub)
    assert await read(watch) == batch(speaker, 0, snapshot=True)
    await speaker.transact(wire.admit(wire.admission(1, 4, path="a")))
    assert await read(watch) == batch(speaker, 1, stored("a"))
    watch.cancel()


async def test_answers_name_what_changed_if_the_pool_was_opened_so(stub):
    """If a transaction is sent again, the answer contains its events again."""
    speaker = await opened_speaker(stub, num_blocks=4, report_events=True)
    answer = await speaker.transact(wire.admit(wire.admission(1, 8, path="ab")))
    assert list(answer.events) == [stored("ab")]
    await speaker.end()
    again = Speaker(stub, speaker.generation)
    assert await again.transact(wire.admit(wire.admission(1, 8, path="ab"))) == answer
    answer = await again.transact(wire.release(1), wire.admit(wire.admission(2, 8, path="xy")))
    assert list(answer.events) == [removed("ab", last=1), stored("xy")]
    answer = await again.transact(wire.release(2))
    assert not answer.events

    speaker = await opened_speaker(stub, num_blocks=4)
    answer = await speaker.transact(wire.admit(wire.admission(1, 8, path="ab")))
    assert not answer.events


async def test_a_watcher_that_falls_behind_gets_a_snapshot_instead():
    feed = EventFeed(max_hashes=2)
    said = [
        EventBatch(7, number, False, (event(letter),)) for number, letter in enumerate("abcd", 1)
    ]
    now = EventBatch(7, 0, True, ())
    async with aclosing(feed.watch("replica", lambda: now)) as watching:
        assert await anext(watching) is now
        feed.publish("replica", said[0])
        feed.publish("replica", said[1])
        assert await anext(watching) is said[0]
        feed.publish("replica", said[2])
        feed.publish("replica", said[3])  # now three hashes are unread, and `max_hashes` is two
        now = EventBatch(7, 4, True, (event("a"),))
        assert await anext(watching) is now
        feed.publish("replica", said[0])
        assert await anext(watching) is said[0]


async def test_more_news_than_the_service_keeps_for_a_watcher_come_as_a_snapshot(stub):
    number = MAX_UNREAD_HASHES + 1
    speaker = await opened_speaker(stub, num_blocks=number + 2)
    watch = stub.WatchEvents(kvpool_pb2.WatchEventsRequest(pool_id="replica"))
    await read(watch)
    long = b"".join(one.to_bytes(32, "big") for one in range(number))
    admission = wire.admission(1, number * BLOCK_SIZE)
    admission.new_hashes = long
    await speaker.transact(wire.admit(admission))
    every = kvpool_pb2.Event(stored=kvpool_pb2.BlocksStored(hashes=long))
    assert await read(watch) == batch(speaker, 1, every, snapshot=True)
    await speaker.transact(wire.admit(wire.admission(2, 4, path="x")))
    assert await read(watch) == batch(speaker, 2, stored("x"))
    watch.cancel()


async def test_watching_a_pool_that_is_not_open_is_refused(stub):
    watch = stub.WatchEvents(kvpool_pb2.WatchEventsRequest(pool_id="elsewhere"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(watch)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watchers_end_at_once_when_the_service_drains(service, stub):
    pools, _ = service
    await stub.OpenPool(wire.open_request())
    watch = stub.WatchEvents(kvpool_pb2.WatchEventsRequest(pool_id="replica"))
    await read(watch)
    draining = asyncio.create_task(pools.drain())
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await read(watch)
    error = status.from_rpc_error(ended.value)
    assert isinstance(error, Unavailable)
    assert error.error_reason == "DRAINING"
    await draining


async def test_a_chain_is_matched_in_every_pool_that_holds_its_beginning(stub):
    a = await opened_speaker(stub, pool_id="a", num_blocks=4)
    b = await opened_speaker(stub, pool_id="b")
    await a.transact(wire.admit(wire.admission(1, 12, path="xyz")))
    await b.transact(wire.admit(wire.admission(1, 9, path="xy")))
    assert await match(stub, "xyw") == [("a", a.generation, 2), ("b", b.generation, 2)]
    assert await match(stub, "xyz") == [("a", a.generation, 3), ("b", b.generation, 2)]
    assert await match(stub, "w") == []
    assert await match(stub, "") == []

    # The block of "xyz" is allocated again. The blocks of "x" and "xy" can still be found.
    await a.transact(wire.release(1), wire.admit(wire.admission(2, 4)))
    assert await match(stub, "xyz") == [("a", a.generation, 2), ("b", b.generation, 2)]
    reopened = await opened_speaker(stub, pool_id="b")
    assert await match(stub, "xyz") == [("a", a.generation, 2)]
    assert reopened.generation > b.generation


async def test_a_chain_comes_in_whole_hashes(stub):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.MatchPrefix(kvpool_pb2.MatchPrefixRequest(hashes=b"x" * 33))
    assert status.from_rpc_error(refused.value).field == "hashes"


async def opened_speaker(stub, **shape) -> Speaker:
    opened = await stub.OpenPool(wire.open_request(**shape))
    return Speaker(stub, opened.generation, shape.get("pool_id", "replica"))


async def read(watch) -> kvpool_pb2.WatchEventsResponse:
    async with asyncio.timeout(wire.SECONDS):
        return await watch.read()


async def match(stub, path: str) -> list[tuple[str, int, int]]:
    response = await stub.MatchPrefix(kvpool_pb2.MatchPrefixRequest(hashes=packed(path)))
    return [(found.pool_id, found.generation, found.num_blocks) for found in response.matches]


def batch(
    speaker: Speaker, sequence: int, *events: kvpool_pb2.Event, snapshot: bool = False
) -> kvpool_pb2.WatchEventsResponse:
    return kvpool_pb2.WatchEventsResponse(
        generation=speaker.generation,
        sequence=sequence,
        snapshot=snapshot,
        events=events,
        groups=wire.open_request().groups if snapshot else (),
    )


def stored(path: str) -> kvpool_pb2.Event:
    return kvpool_pb2.Event(stored=kvpool_pb2.BlocksStored(hashes=packed(path)))


def removed(path: str, *, last: int) -> kvpool_pb2.Event:
    gone = b"".join(hashes(path)[-last:])
    return kvpool_pb2.Event(removed=kvpool_pb2.BlocksRemoved(hashes=gone))


def cleared() -> kvpool_pb2.Event:
    return kvpool_pb2.Event(cleared=kvpool_pb2.AllBlocksCleared())


def event(letter: str) -> BlocksStored:
    return BlocksStored(0, tuple(hashes(letter)))
