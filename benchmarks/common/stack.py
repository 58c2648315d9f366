"""Runs the four services as `stepwell up` does, each in a process, during a measurement."""

import asyncio
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.common.processes import end, environment, spawn, until_serving
from services.cli.processes.child import ChildSpec
from services.cli.processes.plan import Addresses, stages
from services.cli.processes.ports import claim_port
from services.cli.settings import UpSettings

HOST = "127.0.0.1"
START_SECONDS = 180.0


class Stack:
    """The four services. `settings` apply to all of them, and the environment variables `variables`
    to single ones. Other settings have their defaults.

    `async with` starts the services and is entered when they serve. At the end it stops them in the
    order of `stepwell up`.
    """

    def __init__(
        self, settings: UpSettings, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._settings = settings
        self._variables = variables
        self._directory = tempfile.TemporaryDirectory(prefix="stepwell-bench-")
        self._addresses = Addresses(
            HOST,
            claim_port(HOST, 0, "--http-port"),
            claim_port(HOST, 0, "--grpc-port"),
            Path(self._directory.name),
            master_ports=tuple(
                claim_port(HOST, 0, "--master-port")
                for _ in range(settings.replicas if settings.num_ranks > 1 else 0)
            ),
        )
        self._processes: list[list[tuple[str, subprocess.Popen[bytes]]]] = []

    @property
    def http(self) -> str:
        """host:port of the HTTP API."""
        return self._addresses.http

    @property
    def grpc(self) -> str:
        """host:port of the gRPC API."""
        return self._addresses.grpc

    @property
    def scheduler(self) -> str:
        return self._addresses.socket("scheduler")

    def pids(self) -> dict[str, int]:
        """The process id of each service."""
        return {name: process.pid for name, process in self._by_name().items()}

    def logs(self) -> dict[str, str]:
        """Maps each service's name to the text of its log."""
        return {name: self._log(name).read_text(errors="replace") for name in self._by_name()}

    async def __aenter__(self) -> "Stack":
        planned = stages(self._settings, self._addresses, {**environment(), **self._variables})
        self._processes = [
            [(spec.name, self._spawn(spec)) for spec in stage.specs] for stage in planned
        ]
        try:
            ready = _until_ready([spec for stage in planned for spec in stage.specs])
            await until_serving(self._by_name(), self._log, ready, START_SECONDS)
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stop)

    def _spawn(self, spec: ChildSpec) -> subprocess.Popen[bytes]:
        return spawn(spec.command, spec.environ, self._log(spec.name), niceness=spec.niceness)

    def _log(self, name: str) -> Path:
        return Path(self._directory.name) / f"{name}.log"

    def _by_name(self) -> dict[str, subprocess.Popen[bytes]]:
        return {name: process for stage in self._processes for name, process in stage}

    def _stop(self) -> None:
        for stage in self._processes:
            end([process for _, process in stage])
        self._directory.cleanup()


async def _until_ready(specs: Sequence[ChildSpec]) -> None:
    for spec in specs:
        await spec.until_ready()
