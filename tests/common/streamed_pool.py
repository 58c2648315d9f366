"""A kvpool server, over gRPC or stream sockets, whose answers to transactions a test chooses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.server import GrpcServer

NAME = "stepwell.kvpool.v1.KVPool"
SECONDS = 60.0
FEW = 512
"""The server waits to send while this many bytes are unread by the test's client."""

Behavior = Callable[[AsyncIterator[Any], Any], AsyncIterator[kvpool_pb2.TransactResponse]]


def request(number: int, padding: int = 0) -> kvpool_pb2.TransactRequest:
    return kvpool_pb2.TransactRequest(sequence=number, pool_id="x" * padding)


def response(number: int) -> kvpool_pb2.TransactResponse:
    return kvpool_pb2.TransactResponse(sequence=number)


class Pool(kvpool_pb2_grpc.KVPoolServicer):
    """A pool that computes its answers with the function `behavior`, and counts them."""

    def __init__(self, behavior: Behavior) -> None:
        self.num_answered = 0
        self.ended = asyncio.Event()
        self._behavior = behavior

    async def Transact(self, requests: AsyncIterator[Any], context: Any) -> Any:  # noqa: N802
        try:
            async for answer in self._behavior(requests, context):
                yield answer
                self.num_answered += 1
        finally:
            self.ended.set()


async def echoed(requests: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
    async for one in requests:
        yield response(one.sequence)


@asynccontextmanager
async def serving(
    behavior: Behavior, address: str, *, max_calls: int | None = None, lookahead: int = FEW
) -> AsyncIterator[tuple[GrpcServer, Pool, Any]]:
    """A server, its pool, and the stub's method that begins a call of the RPC Transact."""
    pool = Pool(behavior)
    server = GrpcServer(has_local_streams=True, max_concurrent_rpcs=max_calls)
    server.add(kvpool_pb2_grpc.add_KVPoolServicer_to_server, pool, NAME)
    bound = await server.start(address)
    async with open_channel(bound, lookahead_bytes=lookahead) as channel, asyncio.timeout(SECONDS):
        transact = kvpool_pb2_grpc.KVPoolStub(channel).Transact
        yield server, pool, transact
    await server.drain(0)
