"""Fixtures of a kvpool service on a free port or at a Unix socket, and of its client."""

from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from stepwell.kvpool.v1 import kvpool_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.telemetry.tracing import configure_tracing
from services.kvpool.__main__ import PoolService
from services.kvpool.settings import KVPoolSettings


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def service(
    listening: str, spans: InMemorySpanExporter
) -> AsyncIterator[tuple[PoolService, str]]:
    settings = KVPoolSettings(address=listening, drain_seconds=5.0)
    tracing = configure_tracing("kvpool", "", 1.0, exporter=spans)
    service = PoolService(settings, tracing)
    address = await service.start()
    yield service, address
    await service.drain()
    tracing.shutdown()


@pytest.fixture
async def channel(service: tuple[PoolService, str]) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(service[1]) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> kvpool_pb2_grpc.KVPoolStub:
    return kvpool_pb2_grpc.KVPoolStub(channel)
