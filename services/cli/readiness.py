"""Whether a service serves, by grpc.health.v1."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.channel import open_channel
from services.common.server import READINESS

_ASK_AGAIN_SECONDS = 0.1
_ANSWER_SECONDS = 1.0


async def until_serving(address: str) -> None:
    """Returns once the server at host:port or unix:PATH is ready. Asks for ever."""
    request = health_pb2.HealthCheckRequest(service=READINESS)
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(request, timeout=_ANSWER_SECONDS, wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # Not there yet, or going: either way, not serving.
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
