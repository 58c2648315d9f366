"""The worker's gRPC service, which binds its port, loads the model, and runs steps."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from stepwell.worker.v1 import worker_pb2_grpc

from services.common.errors import Aborted, StepwellError, Unavailable
from services.common.process.lifecycle import end_at_once
from services.common.rpc.message_limits import MAX_STEP_BYTES
from services.common.rpc.server import GrpcServer
from services.common.telemetry.exposition import Exposition
from services.common.telemetry.metrics_servicer import collect_in_thread, serve_collect
from services.common.telemetry.tracing import Tracing
from services.common.telemetry.tracing_metrics import TracingCollector
from services.common.tls.credentials import Tls
from services.common.tls.metrics import TlsCollector
from services.worker.adapters.compute import ComputeThread, follow_liveness
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.servicer import WorkerServicer
from services.worker.build import load_worker
from services.worker.core.worker import Worker
from services.worker.parallel.errors import GroupBroken, RankStopped
from services.worker.parallel.group import Group, Timeouts
from services.worker.parallel.membership import Membership, find_membership
from services.worker.settings import WorkerSettings


class GroupMember:
    """This process as a rank of its group (the ranks that compute one model together), or as a
    single worker without a group. Must be constructed in a running event loop.

    The future `broken` resolves with the reason if the group breaks, because a rank has failed or
    stopped, or if this process's device fails.
    """

    def __init__(self, membership: Membership, timeouts: Timeouts) -> None:
        self.membership = membership
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[Unavailable] = self._loop.create_future()
        self._group: Group | None = None

    def join(self, checkpoint_reached: Callable[[], None]) -> Group | None:
        """Waits for the other ranks, and forms the group. Returns None for a single worker.
        Callable from any thread. Raises GroupBroken.

        `checkpoint_reached` is called repeatedly while this method waits, and may raise to abort
        it.
        """
        if self.membership.size > 1:
            self._group = Group(
                self.membership, self._timeouts, self._end_from_thread, checkpoint_reached
            )
        return self._group

    def report_failed_start(self, error: StepwellError) -> None:
        """Sends the other ranks the reason why this rank cannot start."""
        if self._group is not None:
            rank = self.membership.rank
            self._group.watch.report(GroupBroken(f"rank {rank} cannot start: {error}"))

    def leave(self, *, is_stopped: bool) -> None:
        """Closes the connections to the other ranks, which notice at once. `is_stopped` tells them
        that this rank has received a stop signal.
        """
        if self._group is not None:
            self._group.close(is_stopped=is_stopped)

    def end(self, error: Unavailable) -> None:
        """Ends this process, because of a broken group or a failed device."""
        if not self.broken.done():
            self.broken.set_result(error)

    def _end_from_thread(self, error: GroupBroken) -> None:
        self._loop.call_soon_threadsafe(self.end, error)


SERVICE = "worker"
GRPC_SERVICE = "stepwell.worker.v1.Worker"

_CLOSE_SECONDS = 0.2
"""Limit in seconds on two waits after a worker's group broke: for the stream of steps to end with
the reason, and for a step that waits for another rank to end.
"""
_TOLD_SECONDS = 1.0
"""After another rank has reported that it received a stop signal, this rank waits up to this many
seconds for its own stop signal.
"""

logger = logging.getLogger("services.worker")


class WorkerService:
    """Server, compute thread and group membership of a worker. Created in a running event loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        tracing: Tracing,
        tls: Tls | None = None,
        compute: ComputeThread | None = None,
        load: Callable[..., Worker] = load_worker,
    ) -> None:
        """`compute` runs `load` and the steps. `load` gets the arguments of `load_worker`."""
        self._settings = settings
        self._load_worker = load
        timeouts = Timeouts(settings.join_timeout_seconds, settings.collective_timeout_seconds)
        self._member = GroupMember(find_membership(settings, os.environ), timeouts)
        self._compute = compute or ComputeThread()
        metrics = WorkerMetrics()
        self._servicer = WorkerServicer(self._compute, tracing, metrics)
        self._servicer.device_failed = self._member.end
        self._server = GrpcServer(
            tls=tls, has_local_streams=True, max_received_bytes=MAX_STEP_BYTES
        )
        self._server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._servicer, GRPC_SERVICE)
        exposition = Exposition(SERVICE, [metrics], [TlsCollector(tls), TracingCollector(tracing)])
        serve_collect(self._server, collect_in_thread(exposition))
        liveness = follow_liveness(self._compute, self._server.set_live)
        self._liveness = asyncio.create_task(liveness, name="liveness")

    async def run(self, stop: asyncio.Event) -> None:
        """Binds the port before loading the model, so that the error for an address in use is
        raised early. Then loads the model and serves until `stop` is set or the group breaks.
        """
        own = self._settings
        address = await self._server.start(own.address, own.health_address, own.health_file)
        worker = await self._load(stop)
        if worker is None:
            return
        self._servicer.open(worker)
        await self._server.set_ready(True)
        logger.info("serving %s on %s", worker.description.model_name, address)
        await _first_of(stop.wait(), self._member.broken)

    async def close(self, stop: asyncio.Event) -> None:
        """Ends the stream of steps, waits for other calls to end, and leaves the group.

        If the group has broken or the device has failed, the process ends at once. The exception
        is a group that broke because another rank received a stop signal: if this rank receives one
        too, it ends normally.
        """
        has_broken = self._member.broken.done() and not stop.is_set()
        reason = self._member.broken.result() if has_broken else None
        self._servicer.close(reason)
        await self._server.drain(_CLOSE_SECONDS if has_broken else self._settings.drain_seconds)
        if isinstance(reason, RankStopped):
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _TOLD_SECONDS)
        if reason is not None and not (isinstance(reason, RankStopped) and stop.is_set()):
            end_at_once(f"stepwell worker: {reason}")
        self._liveness.cancel()
        self._member.leave(is_stopped=stop.is_set())
        self._compute.close(_CLOSE_SECONDS if self._member.membership.size > 1 else None)

    async def _load(self, stop: asyncio.Event) -> Worker | None:
        """Loads the worker in the compute thread. Returns None if the worker must stop instead."""
        cancelled = threading.Event()

        def checkpoint_reached() -> None:
            if cancelled.is_set():
                raise Aborted("the worker was stopped while it loaded the model")

        def load() -> Worker:
            group = self._member.join(checkpoint_reached)
            try:
                return self._load_worker(self._settings, checkpoint_reached, group)
            except StepwellError as error:
                self._member.report_failed_start(error)
                raise

        loading = self._compute.submit(load)
        await _first_of(stop.wait(), loading, self._member.broken)
        if loading.done():
            return loading.result()
        cancelled.set()
        if not self._member.broken.done():
            await asyncio.wait({loading})
            loading.exception()
        return None


async def _first_of(waiting: Coroutine[Any, Any, Any], *futures: "asyncio.Future[Any]") -> None:
    """Waits until the coroutine or one of the futures is done. Then cancels the coroutine."""
    task = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait({task, *futures}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
