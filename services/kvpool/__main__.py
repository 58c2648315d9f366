"""The pool service: `python -m services.kvpool`."""

import asyncio
import logging
import time

from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.lifecycle import run_service
from services.common.logs import configure_logs
from services.common.metrics import serving_metrics
from services.common.server import GrpcServer
from services.common.settings import load_settings
from services.common.telemetry import Tracing, configure_tracing
from services.kvpool.adapters.event_feed import EventFeed
from services.kvpool.adapters.memory_directory import MemoryDirectory
from services.kvpool.adapters.metrics import PoolCollector
from services.kvpool.adapters.servicer import KVPoolServicer
from services.kvpool.core.pool_host import PoolHost, PoolLimits
from services.kvpool.settings import KVPoolSettings

SERVICE = "kvpool"

logger = logging.getLogger(__name__)


def main() -> None:
    """Reads the settings and serves until told to stop."""
    settings = load_settings(KVPoolSettings, SERVICE)
    configure_logs(SERVICE, settings.log_level, settings.log_format)
    run_service(SERVICE, lambda stop: serve(settings, stop))


async def serve(settings: KVPoolSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains. Raises Unavailable when an address is taken."""
    tracing = configure_tracing(SERVICE, settings.otlp_endpoint, settings.trace_sample_ratio)
    service = PoolService(settings, tracing)
    with serving_metrics(PoolCollector(service.host), settings.metrics_host, settings.metrics_port):
        address = await service.start()
        logger.info("serving", extra={"address": address})
        await stop.wait()
        await service.drain()
    tracing.shutdown()
    logger.info("drained")


class PoolService:
    """Everything behind the service's port, put together."""

    def __init__(self, settings: KVPoolSettings, tracing: Tracing) -> None:
        self._settings = settings
        self._directory = MemoryDirectory()
        self._feed = EventFeed(settings.watch_buffer_hashes)
        self.host: PoolHost[kvpool_pb2.TransactResponse] = PoolHost(
            PoolLimits(settings.max_pools, settings.max_blocks_per_pool),
            (self._directory, self._feed),
            lambda: time.time_ns() // 1_000,
        )
        self._server = GrpcServer(max_concurrent_rpcs=settings.max_concurrent_rpcs)
        self._server.add(
            kvpool_pb2_grpc.add_KVPoolServicer_to_server,
            KVPoolServicer(self.host, self._directory, self._feed, tracing),
            kvpool_pb2.DESCRIPTOR.services_by_name["KVPool"].full_name,
        )

    async def start(self) -> str:
        """Serves; returns the address that was bound. Raises Unavailable when it is taken."""
        address = await self._server.start(self._settings.address)
        await self._server.set_ready(True)
        return address

    async def drain(self) -> None:
        """Ends watchers at once, gives whoever speaks for a pool the grace to finish."""
        self._feed.close()
        await self._server.drain(self._settings.drain_seconds)
        for hosted in self.host.pools():
            self._directory.drop(hosted.pool_id, hosted.generation)


if __name__ == "__main__":
    main()
