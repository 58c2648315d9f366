"""The proxy between services and the faults that it injects."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from benchmarks.peers.faults import Fault, Injection, faults_of
from benchmarks.peers.fields import change_names, changed, field_paths, present_paths
from benchmarks.peers.methods import METHODS, Direction, Lane, message_type
from benchmarks.peers.proxy import PeerProxy
from services.common.rpc.channel import open_channel
from services.common.rpc.protocol import own_release
from services.common.rpc.server import GrpcServer
from tests.gateway.fake_scheduler import FakeScheduler

SESSION = "/stepwell.scheduler.v1.Scheduler/Session"
ANSWERS = Lane(SESSION, Direction.RESPONSE)


def test_every_field_of_every_message_between_services_can_be_changed() -> None:
    for method in METHODS:
        for direction in Direction:
            kind = message_type(Lane(method, direction))
            assert kind is not None
            for path in field_paths(kind):
                assert change_names(kind, path), path


def test_changes_of_one_message() -> None:
    deltas = scheduler_pb2.StepDeltas(
        handles=[3, 4], num_tokens=[1, 2], finished=[scheduler_pb2.Finished(handle=3, message="x")]
    )

    def after(path: str, change: str) -> scheduler_pb2.StepDeltas:
        data = changed(deltas, path.split("."), change)
        assert data is not None
        return scheduler_pb2.StepDeltas.FromString(data)

    assert list(after("handles", "last removed").handles) == [3]
    assert list(after("handles", "one more").handles) == [3, 5]
    assert list(after("num_tokens", "largest").num_tokens) == [1, 2**32 - 1]
    assert after("finished.reason", "unknown").finished[0].reason == 9999
    assert len(after("finished", "last repeated").finished) == 2
    assert after("queue", "added").HasField("queue")
    with pytest.raises(DecodeError):
        after("finished.message", "invalid")
    assert changed(deltas, ("step",), "one less") is None, "no number is below zero"
    assert changed(deltas, ("turns", "handle"), "one more") is None, "there is no turn"
    assert present_paths(deltas) >= {("handles",), ("finished", "message")}


def test_changes_are_valid_messages_unless_their_text_is_invalid() -> None:
    kind = message_type(ANSWERS)
    assert kind is not None
    message = GetMessageClass(kind)()
    for fault in faults_of(ANSWERS):
        if fault.path and (data := changed(message, fault.path, fault.change)) is not None:
            message.FromString(data)


@asynccontextmanager
async def link(address: str, target: str) -> AsyncIterator[tuple[PeerProxy, str]]:
    """A fake scheduler at `target`, and a proxy to it at `address`. Yields proxy and address."""
    server = GrpcServer(has_local_streams=True)
    register = scheduler_pb2_grpc.add_SchedulerServicer_to_server
    server.add(register, FakeScheduler(), "stepwell.scheduler.v1.Scheduler")
    proxy = PeerProxy(await server.start(target))
    try:
        yield proxy, await proxy.start(address)
    finally:
        await proxy.close()
        await server.drain(0)


async def until_ended(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_the_proxy_passes_streams_calls_and_statuses(transport: str, tmp_path: Path) -> None:
    sockets = f"unix:{tmp_path}/here", f"unix:{tmp_path}/there"
    ends = ("127.0.0.1:0", "127.0.0.1:0") if transport == "tcp" else sockets
    async with link(*ends) as (proxy, address), open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        call = stub.Session()
        hello = scheduler_pb2.OpenSession(gateway_id="g", release=own_release())
        await call.write(scheduler_pb2.SessionRequest(open=hello))
        assert (await call.read()).WhichOneof("message") == "opened"
        assert proxy.num_messages[ANSWERS] >= 1
        stats = await stub.GetStats(scheduler_pb2.GetStatsRequest())
        assert stats.model_name == "tiny"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/no.Such/Method")(b"")
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
        proxy.break_calls()
        with pytest.raises(grpc.aio.AioRpcError, match="ended the call"):
            await until_ended(call)


async def test_each_fault_of_a_whole_message_happens_once() -> None:
    async def after(change: str) -> list[bytes]:
        injection = Injection(Fault(ANSWERS, change), num_spared=1)
        passed = [await injection.passed_on(ANSWERS, bytes([65 + n] * 4)) for n in range(4)]
        assert injection.has_happened.is_set()
        return [message for messages in passed for message in messages]

    assert await after("dropped") == [b"AAAA", b"CCCC", b"DDDD"]
    assert await after("repeated") == [b"AAAA", b"BBBB", b"BBBB", b"CCCC", b"DDDD"]
    assert await after("after the next") == [b"AAAA", b"CCCC", b"BBBB", b"DDDD"]
    assert await after("cut") == [b"AAAA", b"BB", b"CCCC", b"DDDD"]
    assert await after("emptied") == [b"AAAA", b"", b"CCCC", b"DDDD"]


async def test_a_changed_field_is_that_of_a_message_that_has_it() -> None:
    fault = Fault(ANSWERS, "one more", ("deltas", "step"))
    injection = Injection(fault)
    state = scheduler_pb2.SessionResponse(state=scheduler_pb2.ReplicaState(ready=True))
    deltas = scheduler_pb2.SessionResponse(deltas=scheduler_pb2.StepDeltas(step=7))
    unchanged = state.SerializeToString()
    assert await injection.passed_on(ANSWERS, unchanged) == [unchanged]
    (passed,) = await injection.passed_on(ANSWERS, deltas.SerializeToString())
    assert scheduler_pb2.SessionResponse.FromString(passed).deltas.step == 8
    await asyncio.wait_for(injection.has_happened.wait(), 1)
