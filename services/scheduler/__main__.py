"""The scheduler service, `python -m services.scheduler`: its composition root."""

import asyncio
import itertools
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import replace

from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.channel import open_channel
from services.common.errors import Aborted, FailedPrecondition
from services.common.lifecycle import run_service
from services.common.metrics import serving_metrics
from services.common.server import GrpcServer
from services.common.telemetry import Tracing, service_tracing
from services.scheduler.adapters.pool_client import PoolClient
from services.scheduler.adapters.queue_watch import QueueWatch
from services.scheduler.adapters.readiness import ReplicaReadiness
from services.scheduler.adapters.replica import ReplicaClient, ReplicaShape
from services.scheduler.adapters.request_intake import RequestIntake
from services.scheduler.adapters.servicer import SchedulerServicer
from services.scheduler.adapters.sessions import Sessions
from services.scheduler.adapters.statistics import Statistics, StepCounts
from services.scheduler.adapters.step_log import scheduler_with_log
from services.scheduler.adapters.step_tracer import StepTracer
from services.scheduler.adapters.traced_ports import TracedExecutor, TracedPool
from services.scheduler.adapters.worker_client import Rank, WorkerGroup
from services.scheduler.core.capacity import max_request_tokens, state_space_conflict
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine_core import EngineCore
from services.scheduler.core.policies import find_policy
from services.scheduler.settings import SchedulerSettings

SERVICE = "scheduler"
SHORTEST_SEQUENCE = 2
"""A token of a prompt, and one to generate."""
LAST_STEP_SECONDS = 1.0
"""After the drain, for a step that nobody waits for: its trace should be whole."""

logger = logging.getLogger(__name__)


def main() -> None:
    """Serves until SIGTERM."""
    run_service(SERVICE, SchedulerSettings, serve)


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains."""
    with service_tracing(SERVICE, settings) as tracing:
        await _serve(settings, tracing, stop)


async def _serve(settings: SchedulerSettings, tracing: Tracing, stop: asyncio.Event) -> None:
    """Builds the service once pool and workers are there, serves until `stop`, and drains."""
    pool_channel = open_channel(settings.kvpool)
    worker_channels = [open_channel(address) for address in settings.workers]
    owner = common_pb2.Owner(name=settings.replica, started_unix_nanos=time.time_ns())
    pool = PoolClient(pool_channel, settings.replica, settings.pool_timeout_seconds, owner)
    workers = WorkerGroup(
        [Rank(*pair) for pair in zip(settings.workers, worker_channels, strict=True)],
        settings.step_timeout_seconds,
        owner,
    )
    replica = ReplicaClient(pool, workers, enable_prefix_caching=settings.enable_prefix_caching)
    try:
        shape = await _unless_stopped(replica, stop)
        config = make_config(settings, shape)
        pool_port = TracedPool(pool, tracing)
        with scheduler_with_log(settings.step_log, config, pool_port, shape) as scheduler:
            counts, sessions, server = StepCounts(), Sessions(), GrpcServer()
            readiness = ReplicaReadiness(sessions, server.set_ready)
            engine = EngineCore(
                scheduler,
                TracedExecutor(workers, tracing),
                replica,
                sessions,
                StepTracer(tracing, counts),
                readiness,
            )
            replica.watch(engine.lost)
            incarnation, model_name = uuid.uuid4().hex, shape.description.model_name
            watch = QueueWatch(
                engine,
                sessions,
                counts,
                max_num_waiting=settings.max_num_waiting,
                max_queue_seconds=settings.max_queue_seconds,
                clock=time.monotonic,
            )
            statistics = Statistics(engine, sessions, counts, incarnation, model_name)
            intake = RequestIntake(
                config=config,
                vocab_size=shape.description.vocab_size,
                hidden_size=shape.description.hidden_size,
                max_model_len=shape.description.max_model_len,
                queue=watch.state,
                clock=time.monotonic,
                next_key=itertools.count(1).__next__,
            )
            opened = what_is_served(shape, config, incarnation)
            servicer = SchedulerServicer(engine, intake, sessions, statistics, opened)
            with serving_metrics(statistics, settings.metrics_address):
                await _serve_engine(settings, server, engine, servicer, readiness, watch, stop)
    except Aborted:
        logger.info("told to stop before pool and workers were there")
    finally:
        replica.close()
        for channel in (pool_channel, *worker_channels):
            await channel.close()


def make_config(settings: SchedulerSettings, shape: ReplicaShape) -> SchedulerConfig:
    """The settings, bounded by what the workers were built for and the pool can hold.

    Raises FailedPrecondition when a sequence could get longer than the step that must hold it, when
    the pool holds none at all, or when states would have to be cached and cannot be.
    """
    built = shape.description
    config = SchedulerConfig(
        max_num_seqs=min(settings.max_num_seqs or built.max_num_seqs, built.max_num_seqs),
        max_num_batched_tokens=min(
            settings.max_num_batched_tokens or built.max_num_batched_tokens,
            built.max_num_batched_tokens,
        ),
        max_model_len=built.max_model_len,
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        fingerprint=built.fingerprint,
        policy=settings.policy,
        async_scheduling=settings.async_scheduling,
        enable_prefix_caching=settings.enable_prefix_caching,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=settings.long_prefill_token_threshold_adaptive,
        scheduler_reserve_full_isl=settings.scheduler_reserve_full_isl,
        watermark=settings.watermark,
        groups=shape.groups,
        drop_last_hit_block=built.drop_last_hit_block,
    )
    config = replace(config, max_model_len=max_request_tokens(config))
    if config.max_model_len < SHORTEST_SEQUENCE:
        raise FailedPrecondition(
            f"{shape.num_blocks} blocks, one of them the null block, do not hold a single token in "
            f"each of {len(config.groups)} groups of layers: give the worker's KV cache more memory"
        )
    if conflict := state_space_conflict(config):
        raise FailedPrecondition(conflict)
    if not config.enable_chunked_prefill and config.token_budget < config.max_model_len:
        raise FailedPrecondition(
            f"without chunked prefill a step of {config.token_budget} tokens cannot hold a "
            f"sequence of {config.max_model_len}: raise max_num_batched_tokens of the worker"
        )
    return config


def what_is_served(
    shape: ReplicaShape, config: SchedulerConfig, incarnation: str
) -> scheduler_pb2.SessionOpened:
    """What a session is told first."""
    built = shape.description
    return scheduler_pb2.SessionOpened(
        incarnation=incarnation,
        model_name=built.model_name,
        max_model_len=built.max_model_len,
        vocab_size=built.vocab_size,
        max_request_tokens=config.max_model_len,
        fingerprint=built.fingerprint,
        tokenizer_fingerprint=built.tokenizer_fingerprint,
        block_size=config.block_size,
        eos_token_ids=built.eos_token_ids,
        priority_scheduling=find_policy(config.policy).uses_priority,
        hidden_size=built.hidden_size,
    )


async def _unless_stopped(replica: ReplicaClient, stop: asyncio.Event) -> ReplicaShape:
    """Waits for pool and workers. Raises Aborted when told to stop first."""
    opening = asyncio.create_task(replica.open())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if opening.done():
        return opening.result()
    opening.cancel()
    with suppress(asyncio.CancelledError):
        await opening
    raise Aborted("told to stop")


async def _serve_engine(
    settings: SchedulerSettings,
    server: GrpcServer,
    engine: EngineCore,
    servicer: SchedulerServicer,
    readiness: ReplicaReadiness,
    watch: QueueWatch,
    stop: asyncio.Event,
) -> None:
    """Runs the engine and its server together; a defect in the engine ends the process."""
    server.add(
        scheduler_pb2_grpc.add_SchedulerServicer_to_server,
        servicer,
        scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name,
    )
    address = await server.start(settings.address)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run(), name="engine")
            beside = [
                tasks.create_task(readiness.run(), name="readiness"),
                tasks.create_task(watch.run(), name="queue watch"),
            ]
            logger.info("serving on %s", address)
            await stop.wait()
            readiness.drain()
            servicer.drain()
            await server.drain(settings.drain_seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_STEP_SECONDS), engine.standstill():
                    logger.info("drained; no step is in flight")
            for task in (*beside, running):
                task.cancel()
    finally:
        await server.drain(0)  # when it was the engine that ended


if __name__ == "__main__":
    main()
