"""Runs the services of any checkout of Stepwell by that checkout's `stepwell up`."""

import asyncio
import os
import re
import sys
import tempfile
import urllib.request
from pathlib import Path

from benchmarks.common.processes import end, environment, spawn, until_serving
from benchmarks.common.stack import HOST, START_SECONDS
from services.cli.processes.ports import claim_port

_ASK_AGAIN_SECONDS = 0.2


class Checkout:
    """Runs `stepwell up` in a checkout whose `gen/` is built, during a measurement.

    All checkouts run with this process's interpreter and packages, so that only Stepwell's own code
    differs. No request is traced. `async with` starts the services, enters when they serve, and
    stops them at the end.
    """

    def __init__(self, root: Path, model: Path, num_blocks: int) -> None:
        self._root = root
        self._flags = (
            *("--model", str(model.resolve()), "--num-blocks", str(num_blocks), "--quiet"),
            *("--trace-sample-ratio", "0"),
        )
        self._directory = tempfile.TemporaryDirectory(prefix="stepwell-bench-")
        self.http = f"{HOST}:{claim_port(HOST, 0, '--http-port')}"
        """host:port of the HTTP API."""
        self.grpc = f"{HOST}:{claim_port(HOST, 0, '--grpc-port')}"
        """host:port of the gRPC API."""

    def pids(self) -> dict[str, int]:
        """The process id of each service."""
        up = self._process.pid
        threads = Path(f"/proc/{up}/task").glob("*/children")
        children = [int(child) for thread in threads for child in thread.read_text().split()]
        named = {_service(child): child for child in children}
        return {name: pid for name, pid in named.items() if name}

    async def __aenter__(self) -> "Checkout":
        ports = (self.http.rpartition(":")[2], self.grpc.rpartition(":")[2])
        path = os.pathsep.join(str(self._root / part) for part in ("", "gen"))
        log = Path(self._directory.name) / "up.log"
        self._process = spawn(
            (
                *(sys.executable, "-m", "services.cli", "up", *self._flags),
                *("--http-port", ports[0], "--grpc-port", ports[1]),
            ),
            {**environment(), "PYTHONPATH": path},
            log,
            directory=self._root,
        )
        try:
            processes = {"stepwell up": self._process}
            ready = _until_healthy(self.http)
            await until_serving(processes, lambda _: log, ready, START_SECONDS)
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        end([self._process])
        self._directory.cleanup()


async def _until_healthy(http: str) -> None:
    """Waits until `/health`, which every version of Stepwell has, returns 200."""
    while True:
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"http://{http}/health", timeout=1)
        except OSError:
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        else:
            return


def _service(pid: int) -> str:
    """The name of the service that a process runs: NAME in its command `python -m services.NAME`.
    Empty for processes with another command.
    """
    command = Path(f"/proc/{pid}/cmdline").read_text()
    found = re.search(r"\0services\.(\w+)\0", command)
    return found[1] if found else ""
