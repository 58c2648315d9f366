"""The four services as `stepwell up` runs them, each a process, for as long as a measurement."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from services.cli import launcher
from services.cli.child import ChildSpec
from services.cli.plan import Addresses, stages
from services.cli.ports import claim_port
from services.cli.settings import UpSettings

HOST = "127.0.0.1"
START_SECONDS = 180.0
STOP_SECONDS = 15.0
_LOOK_AGAIN_SECONDS = 0.2
_TAIL_LINES = 15


class Stack:
    """Services with production defaults but for the size of the cache and the tracing.

    `async with` starts them, returns when they serve, and stops them in their order.
    """

    def __init__(self, settings: UpSettings) -> None:
        self._settings = settings
        self._directory = tempfile.TemporaryDirectory(prefix="stepwell-bench-")
        self._addresses = Addresses(
            HOST,
            claim_port(HOST, 0, "--http-port"),
            claim_port(HOST, 0, "--grpc-port"),
            Path(self._directory.name),
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
        """Where the scheduler listens."""
        return self._addresses.socket("scheduler")

    def pids(self) -> dict[str, int]:
        """The process of each service."""
        return {name: process.pid for name, process in self._by_name().items()}

    def logs(self) -> dict[str, str]:
        """What each service has logged."""
        return {name: self._log(name).read_text(errors="replace") for name in self._by_name()}

    async def __aenter__(self) -> "Stack":
        planned = stages(self._settings, self._addresses, environment())
        self._processes = [
            [(spec.name, self._spawn(spec)) for spec in stage.specs] for stage in planned
        ]
        try:
            async with asyncio.timeout(START_SECONDS), asyncio.TaskGroup() as waiting:
                watching = waiting.create_task(watch(self._by_name(), self._log))
                for stage in planned:
                    for spec in stage.specs:
                        await spec.until_ready()
                watching.cancel()
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _where: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._stop)

    def _spawn(self, spec: ChildSpec) -> subprocess.Popen[bytes]:
        return spawn(spec.command, spec.environ, self._log(spec.name))

    def _log(self, name: str) -> Path:
        return Path(self._directory.name) / f"{name}.log"

    def _by_name(self) -> dict[str, subprocess.Popen[bytes]]:
        return {name: process for stage in self._processes for name, process in stage}

    def _stop(self) -> None:
        for stage in self._processes:
            end([process for _, process in stage])
        self._directory.cleanup()


def spawn(
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    talks: bool = False,
    directory: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a program, in a directory if one is given, whose output goes to a log; if it `talks`,
    standard output and input are pipes. The kernel ends it if this process is killed; call it from
    the main thread.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            (sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), *command),
            env=dict(environ),
            cwd=directory,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else output,
            stderr=output,
        )


async def watch(
    processes: Mapping[str, subprocess.Popen[bytes]], log: Callable[[str], Path]
) -> None:
    """Raises RuntimeError as soon as a process ends, with the last words of its log."""
    while True:
        for name, process in processes.items():
            if process.poll() is not None:
                words = log(name).read_text(errors="replace").splitlines()
                tail = "\n".join(words[-_TAIL_LINES:])
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{tail}")
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


def end(processes: Sequence[subprocess.Popen[bytes]], *, ask: bool = True) -> None:
    """Asks processes to end, all at once, and kills those that do not."""
    for process in processes:
        if ask:
            process.terminate()
    for process in processes:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment() -> dict[str, str]:
    """What the services inherit: settings of whoever runs the benchmark stay out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPWELL_")}
    return {**kept, "GRPC_VERBOSITY": "NONE"}
