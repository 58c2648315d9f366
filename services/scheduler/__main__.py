"""The scheduler service, `python -m services.scheduler`: its composition root."""

import asyncio
import itertools
import logging
import time
import uuid
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.channel import open_channel
from services.common.errors import Aborted
from services.common.exposition import Exposition
from services.common.kv_directory import node_name
from services.common.lifecycle import run_service
from services.common.metrics import serving_metrics
from services.common.metrics_servicer import serve_collect
from services.common.server import GrpcServer
from services.common.telemetry import Tracing, service_tracing
from services.common.tls_metrics import TlsCollector
from services.common.tls_settings import tls_of
from services.common.tracing_metrics import TracingCollector
from services.scheduler.adapters.activity import Activity, WatchedSteps
from services.scheduler.adapters.adapter_loader import AdapterLoader
from services.scheduler.adapters.admin_servicer import SchedulerAdminServicer
from services.scheduler.adapters.client_sessions import ClientSessions
from services.scheduler.adapters.engine_metrics import ClientSessionsCollector, EngineCollector
from services.scheduler.adapters.engine_observer import EngineObserver
from services.scheduler.adapters.grammar_preparation import GrammarPreparation
from services.scheduler.adapters.pool_client import PoolClient
from services.scheduler.adapters.queue_watch import QueueWatch
from services.scheduler.adapters.readiness import ReplicaReadiness
from services.scheduler.adapters.registration import Registration
from services.scheduler.adapters.replica import ReplicaClient, ReplicaShape
from services.scheduler.adapters.replica_config import (
    make_connector,
    scheduler_config,
    session_opened_to_proto,
)
from services.scheduler.adapters.replica_metrics import ReplicaMetrics
from services.scheduler.adapters.request_intake import RequestIntake
from services.scheduler.adapters.request_metrics import RequestMetrics
from services.scheduler.adapters.servicer import SchedulerServicer
from services.scheduler.adapters.sessions import Sessions
from services.scheduler.adapters.speculation_metrics import SpeculationMetrics
from services.scheduler.adapters.statistics import Statistics, StepCounts
from services.scheduler.adapters.step_log import scheduler_with_log
from services.scheduler.adapters.step_tracer import StepTracer
from services.scheduler.adapters.submitter import RequestSubmitter
from services.scheduler.adapters.tier_metrics import TierCollector
from services.scheduler.adapters.traced_ports import TracedExecutor, TracedPool
from services.scheduler.adapters.worker_client import Rank, WorkerGroup
from services.scheduler.core.engine_core import EngineCore
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.ecosystem import Ecosystem
from services.scheduler.settings import SchedulerSettings

if TYPE_CHECKING:
    from services.common.tls import Tls

SERVICE = "scheduler"
LAST_STEP_SECONDS = 1.0
"""After the drain, for a step whose requests have ended: its trace should be complete."""

logger = logging.getLogger(__name__)


def main() -> None:
    """Serves until SIGTERM."""
    run_service(SERVICE, SchedulerSettings, serve)


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains."""
    with service_tracing(SERVICE, settings) as tracing, tls_of(settings) as tls:
        await _serve(settings, tracing, tls, stop)


async def _serve(
    settings: SchedulerSettings, tracing: Tracing, tls: "Tls | None", stop: asyncio.Event
) -> None:
    """Opens pool and workers, builds the service over them, serves until `stop`, and drains."""
    ecosystem, registration = Ecosystem(settings, tls), Registration(settings)
    await registration.require_usable()
    pool_channel = open_channel(settings.kvpool, tls)
    worker_channels = [open_channel(address, tls) for address in settings.workers]
    owner = common_pb2.Owner(name=settings.replica, started_unix_nanos=time.time_ns())
    pool = PoolClient(
        pool_channel,
        settings.replica,
        settings.pool_timeout_seconds,
        owner,
        recorder=ecosystem.recorder,
    )
    workers = WorkerGroup(
        [Rank(*pair) for pair in zip(settings.workers, worker_channels, strict=True)],
        settings.step_timeout_seconds,
        owner,
    )
    replica = ReplicaClient(pool, workers, partial(scheduler_config, settings))
    try:
        shape = await _unless_stopped(replica, stop)
        config = scheduler_config(settings, shape)
        pool_port = TracedPool(pool, tracing)
        connector = make_connector(config, shape)
        if connector is not None:
            replica.on_new_workers = connector.reset_cache
        with scheduler_with_log(
            settings.step_log, config, pool_port, shape, connector
        ) as scheduler:
            executor = TracedExecutor(workers, tracing)
            ecosystem.publish_events(lambda: scheduler.waiting, shape)
            node = node_name(owner.name, owner.started_unix_nanos)
            service = SchedulerService(
                settings,
                tracing,
                tls,
                shape,
                scheduler,
                executor,
                workers,
                replica,
                node,
                ecosystem,
                registration,
                pool_channel,
            )
            shared = [TlsCollector(tls), TracingCollector(tracing)]
            collectors = (*service.collectors, registration, TierCollector(connector))
            own = Exposition(SERVICE, collectors, shared)
            labels = {"model_name": shape.description.model_name, "engine": settings.replica}
            metrics = ReplicaMetrics(own, pool_channel, worker_channels, labels)
            service.serve_collect(metrics)
            with serving_metrics(metrics.render, settings.metrics_address):
                await service.run(stop)
    except Aborted:
        logger.info("stopped before pool and workers could be opened")
    finally:
        replica.close()
        ecosystem.close()
        await registration.close()
        for channel in (pool_channel, *worker_channels):
            await channel.close()


async def _unless_stopped(replica: ReplicaClient, stop: asyncio.Event) -> ReplicaShape:
    """Waits for pool and workers. Raises Aborted if `stop` is set first."""
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
    """Everything behind the service's port, put together over a replica that is open."""

    def __init__(
        self,
        settings: SchedulerSettings,
        tracing: Tracing,
        tls: "Tls | None",
        shape: ReplicaShape,
        scheduler: Scheduler,
        executor: TracedExecutor,
        workers: WorkerGroup,
        replica: ReplicaClient,
        cache_node: str,
        ecosystem: Ecosystem,
        registration: Registration,
        pool_channel: grpc.aio.Channel,
    ) -> None:
        self._settings = settings
        self._ecosystem = ecosystem
        self._registration = registration
        self._model_name, self._node = shape.description.model_name, cache_node
        description, config = shape.description, scheduler.config
        incarnation, counts, sessions = uuid.uuid4().hex, StepCounts(), Sessions()
        self._server = GrpcServer(tls=tls)
        self._readiness = ReplicaReadiness(sessions, self._set_ready)
        tracer = StepTracer(tracing, counts, lambda: scheduler.next_candidates, executor.end)
        requests, steps = RequestMetrics(), WatchedSteps()
        speculation = SpeculationMetrics(config.num_speculative_tokens)
        observer = EngineObserver(tracer, requests, speculation, steps)
        self._engine = EngineCore(scheduler, executor, replica, sessions, observer, self._readiness)
        replica.watch(self._engine.lost)
        max_num_sessions = settings.max_num_sessions
        if max_num_sessions is None:
            max_num_sessions = config.max_running // 2
        client_sessions = ClientSessions(self._engine, sessions, max_num_sessions)
        self._watch = QueueWatch(
            self._engine,
            sessions,
            counts,
            max_num_waiting=settings.max_num_waiting,
            max_queue_seconds=settings.max_queue_seconds,
            client_sessions=client_sessions,
        )
        self.statistics = Statistics(
            self._engine, sessions, counts, incarnation, description.model_name
        )
        self.collectors = (
            EngineCollector(self._engine, sessions, counts, self._watch, description.dtype),
            ClientSessionsCollector(client_sessions),
            requests,
            speculation,
        )
        """The metrics of the engine and its requests."""
        intake = RequestIntake(
            config=config,
            vocab_size=description.vocab_size,
            hidden_size=description.hidden_size,
            max_model_len=description.max_model_len,
            queue_at_arrival=self._watch.state_at_arrival,
            next_key=itertools.count(1).__next__,
            pooler=shape.pooler,
        )
        opened = session_opened_to_proto(shape, config, incarnation)
        opened.cache_node = cache_node
        opened.kvpool_address, opened.pool_id = settings.kvpool, settings.replica
        adapters = AdapterLoader(
            workers,
            description.max_cpu_loras,
            lambda: self._engine.unfinished,
            self._engine.grammar_compiled,
        )
        replica.prepare_workers = adapters.reload
        self._submitter = RequestSubmitter(
            self._engine,
            intake,
            sessions,
            client_sessions,
            GrammarPreparation(workers, adapters, self._engine.grammar_compiled),
        )
        activity = Activity(
            self._engine, self.statistics, counts, steps, pool_channel, settings.replica
        )
        self._server.add(
            scheduler_pb2_grpc.add_SchedulerServicer_to_server,
            SchedulerServicer(
                self._engine,
                self._submitter,
                sessions,
                self.statistics,
                activity,
                tracer,
                opened,
            ),
            scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name,
        )
        self._server.add(
            scheduler_pb2_grpc.add_SchedulerAdminServicer_to_server,
            SchedulerAdminServicer(
                self._engine, self._submitter, sessions, self._readiness, adapters
            ),
            scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerAdmin"].full_name,
        )
        ecosystem.serve_vllm_engine(
            self._engine, sessions, self._submitter, self.statistics, shape, opened
        )

    def serve_collect(self, metrics: ReplicaMetrics) -> None:
        """Serves the metrics of the replica to gateways."""
        serve_collect(self._server, metrics.collect)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs the engine and its server until `stop`, then drains. A defect in the engine ends
        both.
        """
        address = await self._server.start(self._settings.address, self._settings.health_address)
        try:
            await self._ecosystem.start()
            async with asyncio.TaskGroup() as tasks:
                registered = self._registration.run(address, self._model_name, self._node)
                registering = tasks.create_task(registered, name="registration")
                running = [
                    tasks.create_task(self._readiness.run(), name="readiness"),
                    tasks.create_task(self._watch.run(), name="queue watch"),
                    tasks.create_task(self._engine.run(), name="engine"),
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
            await self._drain_servers(0)  # if the engine ended by an error

    async def _set_ready(self, ready: bool) -> None:
        await self._server.set_ready(ready)
        await self._ecosystem.set_ready(ready)

    async def _drain_servers(self, grace_seconds: float) -> None:
        await asyncio.gather(
            self._server.drain(grace_seconds), self._ecosystem.drain(grace_seconds)
        )

    async def _drain(self) -> None:
        """Refuses new requests, lets running ones end within the drain time, and waits for the last
        step.
        """
        self._readiness.drain()
        self._submitter.drain()
        await self._drain_servers(self._settings.drain_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_STEP_SECONDS), self._engine.standstill():
                logger.info("drained; no step is in flight")


if __name__ == "__main__":
    main()
