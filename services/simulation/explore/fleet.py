"""The services of a run. Each one is a process on its own machine."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from services.common.telemetry.tracing import service_resource
from services.gateway.__main__ import Gateway
from services.scheduler.adapters.telemetry.step_tracer import STEP_SERVICE
from services.simulation.explore.members import REDIS, Members, Serve, Shape, links, service_names
from services.simulation.runtime.network import Network
from services.simulation.runtime.process import Process
from services.worker.core.model_runner import ModelRunner

TERMINATION_SECONDS = 30.0
_RESTART_SECONDS = 0.5


@dataclass
class Service:
    """A service, and the process that runs it now."""

    name: str
    serve: Serve
    process: Process
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    is_told_to_stop: bool = False
    """Whether the service was told to stop. Stays True if the service clears `stop`."""
    task: "asyncio.Task[None] | None" = None

    def tell_to_stop(self) -> None:
        """Tells the service to stop, as SIGTERM does."""
        self.is_told_to_stop = True
        self.stop.set()


class Fleet:
    """Replicas and gateways. Each service has its own host name, and the usual port of its kind.
    `device_faults` has pairs of a worker's name and a rule for faults of its device.
    """

    def __init__(
        self,
        network: Network,
        model: Path,
        shape: Shape,
        device_faults: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._network = network
        self._num_replicas = shape.num_replicas
        self.links = links(shape)
        members = Members(model, shape, network.loop)
        for service in ("gateway", "scheduler", "kvpool", "worker", STEP_SERVICE):
            service_resource(service)
        self.services: dict[str, Service] = {}
        faults = list(device_faults)
        for name in service_names(shape):
            serve = members.serve(name, [rule for worker, rule in faults if worker == name])
            self.services[name] = Service(name, serve, Process(self._network.loop, name))

    def start(self, name: str) -> None:
        service = self.services[name]
        seconds_ahead = service.process.seconds_ahead
        service.process = Process(self._network.loop, name)
        service.process.seconds_ahead = seconds_ahead  # the machine's clock
        service.process.on_exit = partial(self._exited, service)
        service.stop, service.is_told_to_stop = asyncio.Event(), False
        service.task = service.process.spawn(service.serve(service.stop))
        service.task.add_done_callback(partial(self._ended, service))

    def _ended(self, service: Service, task: "asyncio.Task[None]") -> None:
        """Restarts a service that has ended by itself, as a supervisor does."""
        if task is service.task and not service.is_told_to_stop and not task.cancelled():
            self._exited(service, repr(task.exception()))

    def _exited(self, service: Service, why: str) -> None:
        self._network.log(f"{service.name} ended: {why}")
        service.process.kill()
        self._network.loop.call_later(_RESTART_SECONDS, self._replace, service, service.process)

    def _replace(self, service: Service, process: Process) -> None:
        if service.process is process:
            self.start(service.name)

    async def crash(self, name: str, seconds: float) -> None:
        """Kills a service, and starts it again after `seconds`."""
        process = self.services[name].process
        if process.is_dead:
            return
        process.kill()
        await asyncio.sleep(seconds)
        self._replace(self.services[name], process)

    async def restart(self, name: str, seconds: float = TERMINATION_SECONDS) -> bool:
        """Restarts a service. Stops it as SIGTERM does. Kills it, and returns False, if that takes
        more than `seconds`.
        """
        service = self.services[name]
        process, task = service.process, service.task
        if process.is_dead or task is None:
            return True
        service.tell_to_stop()
        await asyncio.wait({task}, timeout=seconds)
        has_ended = task.done()
        process.kill()
        self._replace(service, process)
        return has_ended

    def start_all(self) -> None:
        for name in self.services:
            self.start(name)

    async def stop_all(self, seconds: float) -> None:
        """Tells all services except Redis to stop, gateways first, and waits for their ends. Then
        stops Redis. Raises TimeoutError if a service takes longer than `seconds`.
        """
        redis = [one for one in self.services.values() if one.name == REDIS]
        others = [one for one in reversed(self.services.values()) if one.name != REDIS]
        for services in (others, redis):
            for service in services:
                service.tell_to_stop()
            for service in services:
                assert service.task is not None
                async with asyncio.timeout(seconds):
                    await service.task

    def mend_devices(self) -> None:
        """Cancels the faults of all devices, including future ones."""
        for service in self.services.values():
            if isinstance(runner := service.process.inside, ModelRunner):
                model: Any = runner.model
                if model.faults is not None:
                    model.faults.rules = ()

    async def until_ready(self) -> None:
        """Waits until each gateway counts all replicas as ready."""
        gateways = [one for name, one in self.services.items() if name.startswith("gateway")]
        while any(_num_ready(one) < self._num_replicas for one in gateways):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _num_ready(service: Service) -> int:
    gateway = service.process.inside
    return gateway.membership.num_ready if isinstance(gateway, Gateway) else 0
