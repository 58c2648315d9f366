"""The composition root: settings, model, server."""

import asyncio
import gc
import logging
import threading
import time
import uuid
from typing import Any

import torch
from stepwell.worker.v1 import worker_pb2_grpc

from services.common.errors import Aborted
from services.common.lifecycle import run_service
from services.common.logs import configure_logs
from services.common.server import GrpcServer
from services.common.settings import load_settings
from services.common.telemetry import configure_tracing
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.machine import usable_processors
from services.worker.adapters.servicer import WorkerServicer
from services.worker.build import build_engine
from services.worker.core.engine import Engine
from services.worker.settings import WorkerSettings

SERVICE = "stepwell.worker.v1.Worker"

logger = logging.getLogger("services.worker")


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop`. The port is bound first, so that a taken one is known at once."""
    tracing = configure_tracing("worker", settings.otlp_endpoint, settings.trace_sample_ratio)
    compute = ComputeThread()
    servicer = WorkerServicer(compute, tracing)
    server = GrpcServer()
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, SERVICE)
    try:
        address = await server.start(settings.address)
        engine = await _load(settings, compute, stop)
        if engine is not None:
            servicer.open(engine)
            await server.set_serving(True)
            logger.info("serving %s on %s", engine.description.model_name, address)
            await stop.wait()
    finally:
        servicer.close()
        await server.drain(settings.drain_seconds)
        compute.close()
        tracing.shutdown()


async def _load(
    settings: WorkerSettings, compute: ComputeThread, stop: asyncio.Event
) -> Engine | None:
    """The engine; None when told to stop before it was there."""
    given_up = threading.Event()

    def checkpoint_reached() -> None:
        if given_up.is_set():
            raise Aborted("told to stop while loading")

    def load() -> Engine:
        num_threads = settings.num_threads or usable_processors()
        torch.set_num_threads(num_threads)
        begun = time.monotonic()
        engine = build_engine(settings, uuid.uuid4().hex, checkpoint_reached)
        # What is there now stays; a full collection between two steps need not walk through it.
        gc.collect()
        gc.freeze()
        took = time.monotonic() - begun
        logger.info("loaded and warm after %.1f s, %d threads", took, num_threads)
        return engine

    loading = compute.submit(load)
    stopping = asyncio.ensure_future(stop.wait())
    either: set[asyncio.Future[Any]] = {loading, stopping}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        stopping.cancel()
        return loading.result()
    given_up.set()
    await asyncio.wait({loading})
    loading.exception()
    return None


def main() -> None:
    """Reads settings from flags and environment, and runs until SIGTERM."""
    settings = load_settings(WorkerSettings, "worker")
    configure_logs("worker", settings.log_level, settings.log_format)
    run_service("worker", lambda stop: serve(settings, stop))
