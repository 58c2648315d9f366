"""Readiness and liveness checks of a service, over grpc.health.v1."""

import asyncio
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.server import LIVENESS, READINESS

_ASK_AGAIN_SECONDS = 0.1
_ANSWER_SECONDS = 1.0
_UNIX = "unix:"


async def until_ready(address: str) -> None:
    """Waits until the server at host:port or unix:PATH is ready, without a time limit."""
    request = health_pb2.HealthCheckRequest(service=READINESS)
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(request, timeout=_ANSWER_SECONDS, wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # nothing listens yet, or the server is ending
            await asyncio.sleep(_ASK_AGAIN_SECONDS)


async def until_silent(address: str) -> None:
    """Waits until the server at host:port or unix:PATH no longer serves health checks."""
    request = health_pb2.HealthCheckRequest(service=LIVENESS)
    async with open_channel(address) as channel:
        with suppress(grpc.aio.AioRpcError):
            async for _ in health_pb2_grpc.HealthStub(channel).Watch(request):
                pass


class NoAnswer(Exception):
    """A health check had no response, because nothing listens or the connection was closed."""


async def why_not_live(channel: grpc.aio.Channel, address: str) -> str:
    """The reason why the service at the address is not live, or empty text if it is live. Waits for
    the response without a time limit. Raises NoAnswer if the call fails.
    """
    try:
        request = health_pb2.HealthCheckRequest(service=LIVENESS)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
    except grpc.aio.AioRpcError as error:
        raise NoAnswer from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return "its health check says that the service cannot recover by itself"
    return why_unreachable(address)


def why_unreachable(address: str) -> str:
    """Returns an error text if the address is a Unix socket that was removed, else empty text."""
    socket = Path(address.removeprefix(_UNIX))
    is_removed = address.startswith(_UNIX) and not socket.exists()
    return f"its socket {socket} was removed" if is_removed else ""
