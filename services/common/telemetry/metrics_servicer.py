"""Serves the metrics of a process over gRPC, and collects metrics of other processes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import grpc
from stepwell.common.v1 import metrics_pb2, metrics_pb2_grpc

from services.common.rpc.server import Context, GrpcServer
from services.common.telemetry.exposition import Exposition, is_exposition

COLLECT_TIMEOUT_SECONDS = 1.0
"""Limit on the time to collect one process's metrics. A slower process's metrics are omitted."""

Collect = Callable[[Mapping[str, str], bool], Awaitable[bytes]]
"""Returns metrics as text. The arguments are labels to add, and whether to include exemplars."""


class MetricsServicer(metrics_pb2_grpc.MetricsServicer):
    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    async def Collect(
        self, request: metrics_pb2.CollectRequest, context: Context
    ) -> metrics_pb2.CollectResponse:
        labels = {label.key: label.value for label in request.labels}
        text = await self._collect(labels, request.exemplars)
        return metrics_pb2.CollectResponse(text=text)


def serve_collect(server: GrpcServer, collect: Collect) -> None:
    server.add(
        metrics_pb2_grpc.add_MetricsServicer_to_server,
        MetricsServicer(collect),
        metrics_pb2.DESCRIPTOR.services_by_name["Metrics"].full_name,
    )


async def collect_from(
    channel: grpc.aio.Channel, labels: Mapping[str, str] | None = None, *, exemplars: bool
) -> bytes | None:
    """Returns the metrics of another process, with `labels` added to each series. Returns None if
    the process does not respond in time or its response is not in the text format.
    """
    stub = metrics_pb2_grpc.MetricsStub(channel)
    request = metrics_pb2.CollectRequest(
        labels=[
            metrics_pb2.MetricLabel(key=key, value=value) for key, value in (labels or {}).items()
        ],
        exemplars=exemplars,
    )
    try:
        response = await stub.Collect(request, timeout=COLLECT_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError:
        return None
    text = bytes(response.text)
    return text if is_exposition(text) else None


def collect_in_thread(exposition: Exposition) -> Collect:
    """Renders this process's metrics in a thread, so that the event loop is not blocked."""
    return lambda labels, exemplars: asyncio.to_thread(
        exposition.render, labels, exemplars=exemplars
    )
