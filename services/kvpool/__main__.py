"""The composition root of the pool service, which `python -m services.kvpool` starts."""

import gc
import signal

if __name__ == "__main__":
    gc.disable()  # until run_service has frozen the imported objects
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the event loop handles SIGINT

import asyncio
import logging
import time

from prometheus_client.registry import Collector
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.process.lifecycle import run_service
from services.common.redis.connection import RedisConnection
from services.common.rpc.server import GrpcServer
from services.common.telemetry.exposition import Exposition
from services.common.telemetry.metrics import serving_metrics
from services.common.telemetry.metrics_servicer import collect_in_thread, serve_collect
from services.common.telemetry.tracing import Tracing, service_tracing
from services.common.telemetry.tracing_metrics import TracingCollector
from services.common.tls.credentials import Tls
from services.common.tls.metrics import TlsCollector
from services.common.tls.settings import tls_of
from services.kvpool.adapters.event_feed import EventFeed
from services.kvpool.adapters.memory_directory import MemoryDirectory
from services.kvpool.adapters.metrics import DirectoryCollector, PoolCollector
from services.kvpool.adapters.redis_directory import RedisDirectory
from services.kvpool.adapters.servicer import KVPoolServicer
from services.kvpool.core.pool_host import PoolHost
from services.kvpool.settings import KVPoolSettings

SERVICE = "kvpool"
MAX_POOLS = 64
"""Limit on the number of open pools."""
_RPCS_PER_POOL = 16
"""Limit on concurrent calls for each pool. It suffices for the stream of the pool's scheduler, the
WatchEvents streams of gateways, and some short calls.
"""

logger = logging.getLogger(__name__)


def main() -> None:
    run_service(SERVICE, KVPoolSettings, serve)


async def serve(settings: KVPoolSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains. Raises Unavailable if an address is in use."""
    with service_tracing(SERVICE, settings) as tracing, tls_of(settings) as tls:
        service = PoolService(settings, tracing, tls)
        exposition = service.exposition
        with serving_metrics(
            lambda exemplars: exposition.render(exemplars=exemplars), settings.metrics_address
        ):
            address = await service.start()
            logger.info("serving", extra={"address": address})
            await stop.wait()
            await service.drain()
    logger.info("drained")


class PoolService:
    """Builds and connects the parts of the pool service."""

    def __init__(self, settings: KVPoolSettings, tracing: Tracing, tls: Tls | None = None) -> None:
        self._settings = settings
        self._directory = MemoryDirectory()
        self._feed = EventFeed()
        self._shared = (
            None
            if settings.redis_url is None
            else RedisDirectory(RedisConnection(settings.redis_url))
        )
        self.host: PoolHost[kvpool_pb2.TransactResponse] = PoolHost(
            (self._directory, self._feed, *([] if self._shared is None else [self._shared])),
            lambda: time.time_ns() // 1_000,
            max_pools=MAX_POOLS,
            max_blocks_per_pool=settings.max_blocks_per_pool,
        )
        self._server = GrpcServer(
            max_concurrent_rpcs=_RPCS_PER_POOL * MAX_POOLS, tls=tls, has_local_streams=True
        )
        self._server.add(
            kvpool_pb2_grpc.add_KVPoolServicer_to_server,
            KVPoolServicer(self.host, self._directory, self._feed, tracing),
            kvpool_pb2.DESCRIPTOR.services_by_name["KVPool"].full_name,
        )
        own: list[Collector] = [PoolCollector(self.host)]
        if self._shared is not None:
            own.append(DirectoryCollector(self._shared))
        self.exposition = Exposition(SERVICE, own, [TlsCollector(tls), TracingCollector(tracing)])
        """The metrics of the pools and of the directory in Redis."""
        serve_collect(self._server, collect_in_thread(self.exposition))

    async def start(self) -> str:
        """Starts serving and returns the address. Raises Unavailable or SettingError."""
        if self._shared is not None:
            await self._shared.require_usable()
        own = self._settings
        address = await self._server.start(own.address, own.health_address, own.health_file)
        await self._server.set_ready(True)
        return address

    async def drain(self) -> None:
        """Ends WatchEvents streams at once and other calls after the drain time. Then removes the
        pools from the directories of cached prefixes.
        """
        self._feed.close()
        await self._server.drain(self._settings.drain_seconds)
        for hosted in self.host.pools():
            self._directory.drop(hosted.pool_id, hosted.generation)
        if self._shared is not None:
            await self._shared.close()


if __name__ == "__main__":
    main()
