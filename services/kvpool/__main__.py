"""The pool service, `python -m services.kvpool`: its composition root."""

import asyncio
import logging
import time

from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.lifecycle import run_service
from services.common.metrics import serving_metrics
from services.common.server import GrpcServer
from services.common.telemetry import Tracing, service_tracing
from services.kvpool.adapters.event_feed import EventFeed
from services.kvpool.adapters.memory_directory import MemoryDirectory
from services.kvpool.adapters.metrics import PoolCollector
from services.kvpool.adapters.servicer import KVPoolServicer
from services.kvpool.core.pool_host import PoolHost
from services.kvpool.settings import KVPoolSettings

SERVICE = "kvpool"
RPCS_PER_POOL = 16
"""Calls served at once, long streams included, for each pool that may be open: the stream of its
scheduler, watchers, and some short ones.
"""

logger = logging.getLogger(__name__)


def main() -> None:
    """Serves until SIGTERM."""
    run_service(SERVICE, KVPoolSettings, serve)


async def serve(settings: KVPoolSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains. Raises Unavailable if an address is taken."""
    with service_tracing(SERVICE, settings) as tracing:
        service = PoolService(settings, tracing)
        with serving_metrics(PoolCollector(service.host), settings.metrics_address):
            address = await service.start()
            logger.info("serving", extra={"address": address})
            await stop.wait()
            await service.drain()
    logger.info("drained")


class PoolService:
    """Everything behind the service's port, put together."""

    def __init__(self, settings: KVPoolSettings, tracing: Tracing) -> None:
        self._settings = settings
        self._directory = MemoryDirectory()
        self._feed = EventFeed(settings.watch_buffer_hashes)
        self.host: PoolHost[kvpool_pb2.TransactResponse] = PoolHost(
            (self._directory, self._feed),
            lambda: time.time_ns() // 1_000,
            max_pools=settings.max_pools,
            max_blocks_per_pool=settings.max_blocks_per_pool,
        )
        self._server = GrpcServer(max_concurrent_rpcs=RPCS_PER_POOL * settings.max_pools)
        self._server.add(
            kvpool_pb2_grpc.add_KVPoolServicer_to_server,
            KVPoolServicer(self.host, self._directory, self._feed, tracing),
            kvpool_pb2.DESCRIPTOR.services_by_name["KVPool"].full_name,
        )

    async def start(self) -> str:
        """Serves; returns the address that was bound. Raises Unavailable if it is taken."""
        address = await self._server.start(self._settings.address)
        await self._server.set_ready(True)
        return address

    async def drain(self) -> None:
        """Ends the streams of watchers at once, and other calls after the drain time; drops the
        pools' hashes from the directory.
        """
        self._feed.close()
        await self._server.drain(self._settings.drain_seconds)
        for hosted in self.host.pools():
            self._directory.drop(hosted.pool_id, hosted.generation)


if __name__ == "__main__":
    main()
