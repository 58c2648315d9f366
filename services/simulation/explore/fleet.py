"""The services of a run, each as a process on its own machine."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.telemetry.tracing import configure_tracing, service_resource
from services.gateway.__main__ import Gateway
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.settings import GatewaySettings
from services.kvpool.__main__ import serve as serve_pool
from services.kvpool.settings import KVPoolSettings
from services.scheduler.__main__ import serve as serve_scheduler
from services.scheduler.adapters.telemetry.step_tracer import STEP_SERVICE
from services.scheduler.settings import SchedulerSettings
from services.simulation.runtime.lane import VirtualLane
from services.simulation.runtime.machine import outside
from services.simulation.runtime.network import Network
from services.simulation.runtime.process import Process
from services.worker.adapters.compute import ComputeThread
from services.worker.backends.choices import DeviceSetting
from services.worker.build import build_worker
from services.worker.core.worker import Worker
from services.worker.service import WorkerService
from services.worker.settings import WorkerSettings

DEVICE = files("services.simulation.explore") / "device.toml"

_TERMINATION_SECONDS = 30.0
_RESTART_SECONDS = 0.5
_RESUBMIT_SECONDS = 300.0
"""Longer than all faults of a run, so that each request waits until they are over."""

Serve = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


@dataclass
class Service:
    """A service, and the process in which it runs now."""

    name: str
    serve: Serve
    process: Process
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


def service_names(num_replicas: int, num_gateways: int) -> list[str]:
    """The names of the services, in the order of their starts."""
    kinds = ("pool", "worker", "scheduler")
    names = [f"{kind}-{number}" for number in range(num_replicas) for kind in kinds]
    return [*names, *(f"gateway-{number}" for number in range(num_gateways))]


class Fleet:
    """Replicas and gateways. Each service has a host name, and the port of its kind."""

    def __init__(self, network: Network, model: Path, num_replicas: int, num_gateways: int) -> None:
        self._network = network
        self._model = model
        self._num_replicas = num_replicas
        self._tokenizer = _tokenizer(model)
        for service in ("gateway", "scheduler", "kvpool", "worker", STEP_SERVICE):
            service_resource(service)
        self.services: dict[str, Service] = {}
        self.gateways: dict[str, Gateway] = {}
        for number in range(num_replicas):
            self._add(f"pool-{number}", self._pool(number))
            self._add(f"worker-{number}", self._worker(number))
            self._add(f"scheduler-{number}", self._scheduler(number))
        schedulers = tuple(f"scheduler-{number}:9001" for number in range(num_replicas))
        for number in range(num_gateways):
            self._add(f"gateway-{number}", self._gateway(number, schedulers))

    def _add(self, name: str, serve: Serve) -> None:
        self.services[name] = Service(name, serve, Process(self._network.loop, name))

    def start(self, name: str) -> None:
        service = self.services[name]
        service.process = Process(self._network.loop, name)
        service.stop = asyncio.Event()
        self.gateways.pop(name, None)
        service.task = service.process.spawn(service.serve(service.stop))
        service.task.add_done_callback(partial(self._ended, service))

    def _ended(self, service: Service, task: "asyncio.Task[None]") -> None:
        """Starts a service again that has ended by itself, as its supervisor does."""
        if task is not service.task or service.stop.is_set() or task.cancelled():
            return
        self._network.log(f"{service.name} ended: {task.exception()!r}")
        service.process.kill()
        self._network.loop.call_later(_RESTART_SECONDS, self._replace, service, task)

    def _replace(self, service: Service, task: "asyncio.Task[None]") -> None:
        if service.task is task:
            self.start(service.name)

    async def crash(self, name: str, seconds: float) -> None:
        """Kills a service, and starts it again after some seconds."""
        service = self.services[name]
        if service.process.is_dead:
            return
        service.process.kill()
        await asyncio.sleep(seconds)
        if service.process.is_dead:
            self.start(name)

    async def restart(self, name: str) -> None:
        """Ends a service as SIGTERM does, and starts it again. Kills it if it takes too long."""
        service = self.services[name]
        process, task = service.process, service.task
        if process.is_dead or task is None:
            return
        service.stop.set()
        await asyncio.wait({task}, timeout=_TERMINATION_SECONDS)
        if not process.is_dead:
            process.kill()
            self.start(name)

    def start_all(self) -> None:
        for name in self.services:
            self.start(name)

    async def stop_all(self, seconds: float) -> None:
        """Stops all services as SIGTERM does, gateways first. Raises TimeoutError."""
        for service in self.services.values():
            service.stop.set()
        for service in reversed(self.services.values()):
            assert service.task is not None
            async with asyncio.timeout(seconds):
                await service.task

    async def until_ready(self) -> None:
        """Waits until each gateway has a ready replica."""
        names = [name for name in self.services if name.startswith("gateway")]
        while not all(  # noqa: ASYNC110
            name in self.gateways and self.gateways[name].membership.num_ready for name in names
        ):
            await asyncio.sleep(0.05)

    async def held(self) -> list[str]:
        """Blocks and requests that are left in pools and schedulers, as sentences."""
        found = [
            f"{name} has {gateway.gate.inside} requests"
            for name, gateway in self.gateways.items()
            if gateway.gate.inside
        ]
        for number in range(self._num_replicas):
            async with open_channel(f"pool-{number}:9002") as channel:
                stub = kvpool_pb2_grpc.KVPoolStub(channel)
                stats = await stub.GetStats(kvpool_pb2.GetStatsRequest())
            for pool in stats.pools:
                if pool.num_free_blocks != pool.num_usable_blocks:
                    found.append(f"pool-{number} has allocated blocks: {pool}")
            async with open_channel(f"scheduler-{number}:9001") as channel:
                scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
                replica = await scheduler.GetStats(scheduler_pb2.GetStatsRequest())
            if replica.num_running or replica.num_waiting:
                found.append(f"scheduler-{number} has requests: {replica}")
        return found

    def _pool(self, number: int) -> Serve:
        settings = KVPoolSettings(address=f"pool-{number}:9002")
        return lambda stop: serve_pool(settings, stop)

    def _scheduler(self, number: int) -> Serve:
        settings = SchedulerSettings(
            address=f"scheduler-{number}:9001",
            kvpool=f"pool-{number}:9002",
            workers=(f"worker-{number}:9003",),
            replica=f"replica-{number}",
            max_queue_seconds=0.0,
        )
        return lambda stop: serve_scheduler(settings, stop)

    def _worker(self, number: int) -> Serve:
        settings = WorkerSettings(
            model=self._model,
            address=f"worker-{number}:9003",
            device=DeviceSetting.SIMULATED,
            profile=str(DEVICE),
            num_blocks=24,
            max_num_seqs=6,
            max_num_batched_tokens=48,
            num_threads=1,
        )

        async def serve(stop: asyncio.Event) -> None:
            loop: Any = self._network.loop
            tracing = configure_tracing("worker", "", 1.0)
            compute = ComputeThread(lambda _: VirtualLane(loop))
            service = WorkerService(settings, tracing, None, compute, _load)
            try:
                await service.run(stop)
            finally:
                await service.close(stop)

        return serve

    def _gateway(self, number: int, schedulers: tuple[str, ...]) -> Serve:
        settings = GatewaySettings(
            model=self._model,
            schedulers=schedulers,
            http_address=f"gateway-{number}:8000",
            address=f"gateway-{number}:9000",
            trace_slowest_per_minute=0,
            resubmit_timeout_seconds=_RESUBMIT_SECONDS,
        )

        async def serve(stop: asyncio.Event) -> None:
            tracing = configure_tracing("gateway", "", 1.0)
            gateway = Gateway(settings, self._tokenizer, tracing)
            self.gateways[f"gateway-{number}"] = gateway
            await gateway.start()
            await gateway.serve_until(stop)

        return serve


@cache
def _tokenizer(model: Path) -> HfTokenizer:
    return load_tokenizer(model)


def _load(settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: None) -> Worker:
    incarnation = uuid.uuid4().hex
    with outside():
        return build_worker(settings, incarnation, checkpoint_reached, group)
