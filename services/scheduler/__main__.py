"""The scheduler service, `python -m services.scheduler`: its composition root."""

import gc
import signal

if __name__ == "__main__":
    gc.disable()  # until run_service has frozen the objects that the imports create
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the event loop handles SIGINT

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial

from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.errors import Aborted
from services.common.pool.kv_directory import node_name
from services.common.process.lifecycle import run_service
from services.common.rpc.channel import open_channel
from services.common.rpc.message_limits import MAX_STEP_BYTES
from services.common.rpc.server import GrpcServer
from services.common.telemetry.exposition import Exposition
from services.common.telemetry.metrics import serving_metrics
from services.common.telemetry.metrics_servicer import serve_collect
from services.common.telemetry.tracing import Tracing, service_tracing
from services.common.telemetry.tracing_metrics import TracingCollector
from services.common.tls.credentials import Tls
from services.common.tls.metrics import TlsCollector
from services.common.tls.settings import tls_of
from services.scheduler.adapters.gateways.admin_servicer import SchedulerAdminServicer
from services.scheduler.adapters.gateways.registration import Registration
from services.scheduler.adapters.gateways.servicer import SchedulerServicer
from services.scheduler.adapters.pool.pool_client import PoolClient
from services.scheduler.adapters.replica import ReplicaClient, ReplicaShape
from services.scheduler.adapters.replica_config import scheduler_config
from services.scheduler.adapters.telemetry.engine_metrics import StartingCollector
from services.scheduler.adapters.telemetry.replica_metrics import ReplicaMetrics
from services.scheduler.adapters.telemetry.step_log import scheduler_with_log
from services.scheduler.adapters.telemetry.step_tracer import STEP_SERVICE
from services.scheduler.adapters.telemetry.traced_ports import TracedExecutor, TracedPool
from services.scheduler.adapters.workers.worker_client import Rank, WorkerGroup
from services.scheduler.ecosystem import Ecosystem
from services.scheduler.options.listed import TRANSFERS
from services.scheduler.parts import Parts
from services.scheduler.settings import SchedulerSettings

SERVICE = "scheduler"
LAST_STEP_SECONDS = 1.0
"""Limit on the wait, after the drain, for the step in flight, so that its trace is complete."""

logger = logging.getLogger(__name__)


def main() -> None:
    run_service(SERVICE, SchedulerSettings, serve)


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains."""
    with service_tracing(SERVICE, settings) as tracing, tls_of(settings) as tls:
        await _serve(settings, tracing, tls, stop)


async def _serve(
    settings: SchedulerSettings, tracing: Tracing, tls: Tls | None, stop: asyncio.Event
) -> None:
    ecosystem, registration = Ecosystem(settings, tls), Registration(settings)
    await registration.require_usable()
    pool_channel = open_channel(settings.kvpool, tls)
    worker_channels = [
        open_channel(address, tls, max_sent_bytes=MAX_STEP_BYTES) for address in settings.workers
    ]
    owner = common_pb2.Owner(name=settings.replica, started_unix_nanos=time.time_ns())
    pool = PoolClient(
        pool_channel,
        settings.replica,
        settings.pool_timeout_seconds,
        owner,
        recorder=ecosystem.recorder,
        address=settings.kvpool,
    )
    workers = WorkerGroup(
        [Rank(*pair) for pair in zip(settings.workers, worker_channels, strict=True)],
        settings.step_timeout_seconds,
        owner,
    )
    replica = ReplicaClient(pool, workers, partial(scheduler_config, settings))
    try:
        shared = [TlsCollector(tls), TracingCollector(tracing)]
        metrics = ReplicaMetrics(
            Exposition(SERVICE, [StartingCollector()], shared),
            pool_channel,
            worker_channels,
            {"engine": settings.replica},
        )
        with serving_metrics(metrics.render, settings.metrics_address):
            shape = await _unless_stopped(replica, stop)
            config = scheduler_config(settings, shape)
            step_tracing = tracing.of(STEP_SERVICE)
            pool_port = TracedPool(pool, step_tracing)
            transfers = TRANSFERS(config, shape.description.num_tier_blocks)
            replica.on_new_workers = transfers.on_new_workers
            with scheduler_with_log(
                settings.step_log, config, pool_port, shape, transfers.connect
            ) as scheduler:
                executor = TracedExecutor(workers, step_tracing)
                ecosystem.publish_events(scheduler)
                server = GrpcServer(tls=tls, has_local_streams=True)

                async def set_ready(ready: bool) -> None:
                    await server.set_ready(ready)
                    await ecosystem.set_ready(ready)

                parts = Parts(
                    settings,
                    tracing,
                    shape,
                    scheduler,
                    executor,
                    workers,
                    replica,
                    pool_channel,
                    node_name(owner.name, owner.started_unix_nanos),
                    set_ready,
                )
                ecosystem.serve_vllm_engine(parts, shape)
                service = SchedulerService(settings, server, parts, ecosystem, registration)
                collectors = (*parts.collectors, registration, *transfers.collectors)
                metrics.own = Exposition(SERVICE, collectors, shared)
                metrics.labels = {**metrics.labels, "model_name": shape.description.model_name}
                serve_collect(server, metrics.collect)
                await service.run(stop)
    except Aborted:
        logger.info("stopped before the kvpool and the workers could be opened")
    finally:
        replica.close()
        ecosystem.close()
        await registration.close()
        for channel in (pool_channel, *worker_channels):
            await channel.close()


async def _unless_stopped(replica: ReplicaClient, stop: asyncio.Event) -> ReplicaShape:
    """Opens the pool and the workers. Raises Aborted if `stop` is set first."""
    opening = asyncio.create_task(replica.open())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if opening.done():
        return opening.result()
    opening.cancel()
    with suppress(asyncio.CancelledError):
        await opening
    raise Aborted("stopped")


class SchedulerService:
    """The scheduler's gRPC server and engine."""

    def __init__(
        self,
        settings: SchedulerSettings,
        server: GrpcServer,
        parts: Parts,
        ecosystem: Ecosystem,
        registration: Registration,
    ) -> None:
        self.parts = parts
        self._settings = settings
        self._server = server
        self._ecosystem = ecosystem
        self._registration = registration
        server.add(
            scheduler_pb2_grpc.add_SchedulerServicer_to_server,
            SchedulerServicer(
                parts.engine,
                parts.submitter,
                parts.sessions,
                parts.statistics,
                parts.activity,
                parts.tracer,
                parts.opened,
            ),
            scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name,
        )
        server.add(
            scheduler_pb2_grpc.add_SchedulerAdminServicer_to_server,
            SchedulerAdminServicer(
                parts.engine, parts.submitter, parts.sessions, parts.readiness, parts.adapters
            ),
            scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerAdmin"].full_name,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Runs engine and server until `stop` is set, then drains. An engine error ends both."""
        own = self._settings
        address = await self._server.start(own.address, own.health_address, own.health_file)
        try:
            await self._ecosystem.start()
            async with asyncio.TaskGroup() as tasks:
                opened = self.parts.opened
                registered = self._registration.run(address, opened.model_name, opened.cache_node)
                registering = tasks.create_task(registered, name="registration")
                running = [
                    tasks.create_task(self.parts.readiness.run(), name="readiness"),
                    tasks.create_task(self.parts.watch.run(), name="queue watch"),
                    tasks.create_task(self.parts.engine.run(), name="engine"),
                    tasks.create_task(self._ecosystem.run(), name="replay of events"),
                ]
                logger.info("serving on %s", address)
                await stop.wait()
                registering.cancel()
                await self._registration.leave()
                await self._drain()
                for task in running:
                    task.cancel()
        finally:
            await self._drain_servers(0)  # needed if an error has ended the engine

    async def _drain_servers(self, grace_seconds: float) -> None:
        await asyncio.gather(
            self._server.drain(grace_seconds), self._ecosystem.drain(grace_seconds)
        )

    async def _drain(self) -> None:
        """Refuses new requests, waits up to `drain_seconds` for the present requests to end, and
        then waits for the step in flight. If the engine can run no more steps, closes the gateways'
        sessions at once, so that the gateways send the requests to other replicas. This happens,
        for example, if the pool and the workers stop as well.
        """
        self.parts.readiness.drain()
        self.parts.submitter.drain()
        draining = asyncio.create_task(self._drain_servers(self._settings.drain_seconds))
        stalling = asyncio.create_task(self.parts.readiness.cannot_run_steps.wait())
        await asyncio.wait({draining, stalling}, return_when=asyncio.FIRST_COMPLETED)
        stalling.cancel()
        if not draining.done():
            logger.warning(
                "no step can run any more: the gateways' sessions are closed before their "
                "requests have ended"
            )
            await self._drain_servers(0)
        await draining
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_STEP_SECONDS), self.parts.engine.standstill():
                logger.info("drained; no step is in flight")


if __name__ == "__main__":
    main()
