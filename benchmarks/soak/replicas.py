"""Runs gateways and several replicas. Each service is a process that a supervisor restarts."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.common.gateways import GatewayProgram
from benchmarks.common.processes import environment
from benchmarks.common.stack import HOST, START_SECONDS
from services.cli.processes.child import ChildSpec
from services.cli.processes.plan import Addresses, stages
from services.cli.processes.ports import claim_port
from services.cli.processes.supervisor import RestartPolicy, Supervisor
from services.cli.settings import UpSettings

LOG_NAME = "services.log"
RECOVERY_SECONDS = 60.0


class Replicas:
    """Services that are started, watched and restarted as by `stepwell up`.

    `async with` starts the services, waits until all serve, and at the end stops them in the order
    of `stepwell up`. `names` are the names of the replicas' services. All `gateways` share all
    replicas. All output is written to services.log in `directory`. The path of `directory` must be
    short, because it also contains the sockets.
    """

    def __init__(
        self,
        settings: UpSettings,
        directory: Path,
        restarts: RestartPolicy,
        *,
        num_gateways: int = 1,
        rewire: Callable[[ChildSpec], ChildSpec] = lambda spec: spec,
    ) -> None:
        """`rewire` may change the start command of a service."""
        http, grpc = claim_port(HOST, 0, "--http-port"), claim_port(HOST, 0, "--grpc-port")
        admin = claim_port(HOST, 0, "--admin-port") if num_gateways == 1 else None
        addresses = Addresses(HOST, http, grpc, directory, admin_port=admin)
        self.admin = addresses.admin
        """host:port of the administration API. It is None if there are several gateways."""
        planned = stages(settings, addresses, environment())
        plan = [replace(stage, specs=tuple(map(rewire, stage.specs))) for stage in planned]
        self.first_gateway = GatewayProgram(plan[0].specs[0], addresses.http, addresses.grpc)
        others = [
            self.first_gateway.another(f"gateway-{number}") for number in range(1, num_gateways)
        ]
        self.gateways = [self.first_gateway, *others][:num_gateways]
        plan[0] = replace(plan[0], specs=tuple(gateway.spec for gateway in self.gateways))
        self.names = [spec.name for stage in plan[1:] for spec in stage.specs]
        self.record = ServiceRecord(directory / LOG_NAME)
        self._supervisor = Supervisor(plan, self.record, restarts)
        self._running: asyncio.Task[None] | None = None

    @property
    def http(self) -> str:
        """host:port of the first gateway's HTTP API."""
        return self.first_gateway.http

    @property
    def grpc(self) -> str:
        """host:port of the first gateway's gRPC API."""
        return self.first_gateway.grpc

    def pid(self, name: str) -> int:
        """The process id of a service's current process, or of its last one if that has ended."""
        return self._supervisor.pid(name)

    async def kill(self, name: str) -> None:
        """Kills a service, and waits until it is ready. Raises TimeoutError after a minute."""
        before = self.record.num_ready.get(name, 0)
        with suppress(ProcessLookupError):
            os.kill(self.pid(name), signal.SIGKILL)
        async with asyncio.timeout(RECOVERY_SECONDS):
            while self.record.num_ready.get(name, 0) == before:
                self.record.changed.clear()
                await self.record.changed.wait()

    async def __aenter__(self) -> "Replicas":
        self._running = asyncio.create_task(self._supervisor.run())
        ready = asyncio.create_task(self._supervisor.all_ready.wait())
        await asyncio.wait(
            (self._running, ready), timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if not ready.done():
            ready.cancel()
            await self._stop()
            raise RuntimeError(f"not ready: {', '.join(self._supervisor.not_ready())}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        assert self._running is not None
        self._supervisor.stop.set()
        await self._running
        self.record.close()


class ServiceRecord:
    """Observes the supervisor: logs all output, and counts how often each service became ready."""

    def __init__(self, log: Path) -> None:
        self.num_ready: dict[str, int] = {}
        self.changed = asyncio.Event()
        self._log = log.open("w")

    def line(self, name: str, text: str) -> None:
        self._write(f"{name}: {text}")

    def ready(self, name: str, seconds: float, num_restarts: int) -> None:
        self.num_ready[name] = self.num_ready.get(name, 0) + 1
        self.changed.set()
        self._write(f"{name} is ready after {seconds:.2f} s, restart {num_restarts}")

    def hung(self, name: str, reason: str) -> None:
        self._write(f"{name} hangs: {reason}")

    def died(
        self,
        name: str,
        status: str,
        tail: Sequence[str],  # noqa: ARG002
        delay_seconds: float,
        num_deaths: int,  # noqa: ARG002
    ) -> None:
        self._write(f"{name} ended: {status}; again in {delay_seconds:g} s")

    def stopping(self, name: str) -> None:
        self._write(f"{name} is asked to end")

    def killed(self, name: str, seconds: float) -> None:
        self._write(f"{name} did not end within {seconds:g} s")

    def close(self) -> None:
        self._log.close()

    def _write(self, text: str) -> None:
        self._log.write(f"{time.time():.3f} {text}\n")
        self._log.flush()
