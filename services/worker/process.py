"""The composition root: settings, model, server."""

import asyncio
import gc
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
from stepwell.worker.v1 import worker_pb2_grpc

from services.common.errors import Aborted, StepwellError
from services.common.lifecycle import end_at_once, run_service
from services.common.server import GrpcServer
from services.common.telemetry import Tracing, service_tracing
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.liveness import follow_liveness
from services.worker.adapters.servicer import WorkerServicer
from services.worker.build import build_worker
from services.worker.core.worker import Worker
from services.worker.models.load import check_configuration
from services.worker.parallel.errors import GroupBroken
from services.worker.parallel.group import Group, Timeouts
from services.worker.parallel.membership import Membership, find_membership
from services.worker.platforms.processors import usable_processors
from services.worker.platforms.threads import choose_threads
from services.worker.settings import WorkerSettings

SERVICE = "worker"
GRPC_SERVICE = "stepwell.worker.v1.Worker"

_FAREWELL_SECONDS = 0.2
"""Time for a stream to end with its reason when the group is broken, and for a step that waits for
a rank that has left to go with the process.
"""

logger = logging.getLogger("services.worker")


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains. Raises SettingError for a rank without a group."""
    membership = find_membership(settings, os.environ)
    with service_tracing(SERVICE, settings) as tracing:
        await _serve(settings, membership, tracing, stop)


async def _serve(
    settings: WorkerSettings, membership: Membership, tracing: Tracing, stop: asyncio.Event
) -> None:
    """Serves until `stop`. The port is bound first, so that a taken one is known at once.

    As a rank of a group that breaks it ends the process at once, since the thread that computes may
    be waiting for a peer that is gone.
    """
    compute = ComputeThread()
    servicer = WorkerServicer(compute, tracing)
    server = GrpcServer()
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, GRPC_SERVICE)
    place = _Place(membership, asyncio.get_running_loop().create_future())
    watching = asyncio.create_task(follow_liveness(compute, server.set_live), name="liveness")
    try:
        address = await server.start(settings.address)
        worker = await _load(settings, place, compute, stop)
        if worker is not None:
            servicer.open(worker)
            await server.set_ready(True)
            logger.info("serving %s on %s", worker.description.model_name, address)
            await _first({asyncio.ensure_future(stop.wait()), place.broken})
    finally:
        broken = place.broken.result() if place.broken.done() and not stop.is_set() else None
        servicer.close(broken)
        await server.drain(_FAREWELL_SECONDS if broken else settings.drain_seconds)
        if broken is not None:
            end_at_once(f"stepwell worker: {broken}")
        watching.cancel()
        place.leave()
        compute.close(_FAREWELL_SECONDS if membership.size > 1 else None)


class _Place:
    """This process's place in a group, if it has one. `broken` resolves when that cannot go on."""

    def __init__(self, membership: Membership, broken: "asyncio.Future[GroupBroken]") -> None:
        self.membership = membership
        self.broken = broken
        self._loop = asyncio.get_running_loop()
        self._group: Group | None = None

    def join(
        self, settings: WorkerSettings, checkpoint_reached: Callable[[], None]
    ) -> Group | None:
        """Waits for the other ranks; None without any. Raises GroupBroken."""
        if self.membership.size > 1:
            timeouts = Timeouts(settings.join_timeout_seconds, settings.collective_timeout_seconds)
            self._group = Group(self.membership, timeouts, self._break, checkpoint_reached)
        return self._group

    def give_up(self, error: StepwellError) -> None:
        """Tells the other ranks why there will be no group."""
        if self._group is not None:
            rank = self.membership.rank
            self._group.watch.report(GroupBroken(f"rank {rank} cannot start: {error}"))

    def leave(self) -> None:
        """Leaves the group, whose other ranks notice at once."""
        if self._group is not None:
            self._group.close()

    def _break(self, error: GroupBroken) -> None:
        self._loop.call_soon_threadsafe(self._resolve, error)

    def _resolve(self, error: GroupBroken) -> None:
        if not self.broken.done():
            self.broken.set_result(error)


async def _first(waiting: set[asyncio.Future[Any]]) -> None:
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)


async def _load(
    settings: WorkerSettings, place: _Place, compute: ComputeThread, stop: asyncio.Event
) -> Worker | None:
    """The worker; None when told to stop, or the group broke, before it was there."""
    given_up = threading.Event()

    def checkpoint_reached() -> None:
        if given_up.is_set():
            raise Aborted("told to stop while loading")

    def load() -> Worker:
        check_configuration(settings.model, place.membership.size)
        group = place.join(settings, checkpoint_reached)
        try:
            return load_as(group)
        except StepwellError as error:
            place.give_up(error)
            raise

    def load_as(group: Group | None) -> Worker:
        sharers = 1 if group is None else len(group.local_ranks)
        threads = choose_threads(usable_processors(), sharers, settings.num_threads)
        torch.set_num_threads(threads.num_threads)
        begun = time.monotonic()
        worker = build_worker(settings, uuid.uuid4().hex, checkpoint_reached, group)
        # What is there now stays; a full collection between two steps need not walk through it.
        gc.collect()
        gc.freeze()
        took = time.monotonic() - begun
        logger.info("loaded and warm after %.1f s, computing with %s", took, threads)
        return worker

    loading = compute.submit(load)
    stopping = asyncio.ensure_future(stop.wait())
    await _first({loading, stopping, place.broken})
    if loading.done():
        stopping.cancel()
        return loading.result()
    given_up.set()
    if place.broken.done():
        return None
    await asyncio.wait({loading})
    loading.exception()
    return None


def main() -> None:
    """Serves until SIGTERM."""
    run_service(SERVICE, WorkerSettings, serve)
