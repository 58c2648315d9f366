"""A replica with its own pool, worker and scheduler processes, as on another machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.stack import ROOT
from tests.redis_servers import free_port


class OtherReplica:
    """A pool, a worker and a scheduler on their own ports. The scheduler registers in Redis."""

    def __init__(self, model: Path, redis_url: str, directory: Path) -> None:
        ports = [free_port() for _ in range(3)]
        self.address, kvpool, worker = (f"127.0.0.1:{port}" for port in ports)
        self._log = (directory / "other_replica.log").open("w")
        self._commands = {
            "kvpool": ["--address", kvpool, "--redis-url", redis_url],
            "worker": [
                *("--address", worker, "--model", str(model)),
                *("--num-threads", "1", "--num-blocks", "200"),
            ],
            "scheduler": [
                *("--address", self.address, "--kvpool", kvpool, "--workers", worker),
                *("--redis-url", redis_url, "--drain-seconds", "15"),
            ],
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for service in self._commands:
            self.start(service)

    def start(self, service: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if "STEPWELL" not in name}
        self._processes[service] = subprocess.Popen(
            [sys.executable, "-m", f"services.{service}", *self._commands[service]],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "gen")])},
        )

    def signal(self, service: str, signum: signal.Signals) -> None:
        self._processes[service].send_signal(signum)

    def wait(self, service: str) -> int:
        return self._processes[service].wait(30)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._log.close()
