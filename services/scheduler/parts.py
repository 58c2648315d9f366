"""Builds the engine core of a scheduler and the adapters around it."""

import itertools
import time
import uuid
from collections.abc import Awaitable, Callable

import grpc

from services.common.telemetry.tracing import Tracing
from services.scheduler.adapters.gateways.queue_watch import QueueWatch
from services.scheduler.adapters.gateways.readiness import ReplicaReadiness
from services.scheduler.adapters.gateways.request_intake import RequestIntake
from services.scheduler.adapters.gateways.resumable_sessions import ResumableSessions
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.gateways.submitter import RequestSubmitter
from services.scheduler.adapters.replica import ReplicaClient, ReplicaShape
from services.scheduler.adapters.replica_config import session_opened_to_proto
from services.scheduler.adapters.telemetry.activity import Activity, WatchedSteps
from services.scheduler.adapters.telemetry.engine_metrics import (
    EngineCollector,
    ResumableSessionsCollector,
    SpeculationMetrics,
)
from services.scheduler.adapters.telemetry.engine_observer import EngineObserver
from services.scheduler.adapters.telemetry.program_metrics import ProgramMetrics
from services.scheduler.adapters.telemetry.request_metrics import RequestMetrics
from services.scheduler.adapters.telemetry.statistics import Statistics, StepCounts
from services.scheduler.adapters.telemetry.step_tracer import StepTracer
from services.scheduler.adapters.telemetry.traced_ports import TracedExecutor
from services.scheduler.adapters.workers.adapter_loader import AdapterLoader
from services.scheduler.adapters.workers.grammar_preparation import GrammarPreparation
from services.scheduler.adapters.workers.worker_client import WorkerGroup
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine.engine_core import EngineCore
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.policies.continuum.pins import Pins
from services.scheduler.core.policies.program.retention import ProgramRetention
from services.scheduler.settings import SchedulerSettings


class Parts:
    """The engine core of a scheduler, and its adapters. The pool and workers must be open."""

    def __init__(
        self,
        settings: SchedulerSettings,
        tracing: Tracing,
        shape: ReplicaShape,
        scheduler: Scheduler,
        executor: TracedExecutor,
        workers: WorkerGroup,
        replica: ReplicaClient,
        pool_channel: grpc.aio.Channel,
        cache_node: str,
        set_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`cache_node` is the pool's name in the directory of cached blocks."""
        description, config = shape.description, scheduler.config
        incarnation, counts, steps = (
            uuid.uuid4().hex,
            StepCounts(scheduler.step_costs),
            WatchedSteps(),
        )
        self.sessions = Sessions()
        self.readiness = ReplicaReadiness(self.sessions, set_ready)
        self.tracer = StepTracer(
            tracing,
            counts,
            lambda: scheduler.next_candidates,
            executor.end,
            step_sample_ratio=settings.trace_step_sample_ratio,
        )
        requests = RequestMetrics()
        speculation = SpeculationMetrics(config.num_speculative_tokens)
        observer = EngineObserver(self.tracer, requests, speculation, steps)
        self.engine = EngineCore(
            scheduler, executor, replica, self.sessions, observer, self.readiness, time.monotonic
        )
        replica.watch(self.engine.lost)
        self.adapters = AdapterLoader(
            workers,
            description.max_cpu_loras,
            lambda: self.engine.unfinished,
            self.engine.changes.grammar_compiled,
        )
        replica.prepare_workers = self.adapters.reload
        most = settings.max_num_sessions
        client_sessions = ResumableSessions(
            self.engine,
            self.sessions,
            self.adapters,
            config.max_running // 2 if most is None else most,
        )
        self.watch = QueueWatch(
            self.engine,
            self.sessions,
            counts,
            max_num_waiting=settings.max_num_waiting,
            max_queue_seconds=settings.max_queue_seconds,
            client_sessions=client_sessions,
        )
        self.statistics = Statistics(
            self.engine,
            self.sessions,
            counts,
            incarnation,
            description.model_name,
            lambda: replica.kernels,
        )
        self.collectors = (
            EngineCollector(
                self.engine, self.sessions, counts, self.watch, description.kv_cache_dtype
            ),
            ResumableSessionsCollector(client_sessions),
            requests,
            speculation,
            *_program_metrics(scheduler),
        )
        self.submitter = RequestSubmitter(
            self.engine,
            _intake(shape, config, self.watch),
            self.sessions,
            client_sessions,
            GrammarPreparation(workers, self.adapters, self.engine.changes.grammar_compiled),
        )
        self.activity = Activity(
            self.engine, self.statistics, counts, steps, pool_channel, settings.replica
        )
        self.opened = session_opened_to_proto(shape, config, incarnation)
        """The first message to a gateway in each gRPC session."""
        self.opened.cache_node = cache_node
        self.opened.kvpool_address, self.opened.pool_id = settings.kvpool, settings.replica


def _program_metrics(scheduler: Scheduler) -> list[ProgramMetrics]:
    retention = scheduler.retention
    return [ProgramMetrics(retention)] if isinstance(retention, ProgramRetention | Pins) else []


def _intake(shape: ReplicaShape, config: SchedulerConfig, watch: QueueWatch) -> RequestIntake:
    description = shape.description
    return RequestIntake(
        config=config,
        vocab_size=description.vocab_size,
        hidden_size=description.hidden_size,
        max_model_len=description.max_model_len,
        queue_at_arrival=watch.state_at_arrival,
        next_key=itertools.count(1).__next__,
        pooler=shape.pooler,
    )
