"""All four services, run by `stepwell up`."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.plain_http import http_get
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "scheduler", "kvpool", "worker")
_READY = re.compile(r"ready: (\S+) at (https?://\S+) \(gRPC at (\S+)\)")
_ADMIN = re.compile(r"operators' calls will be at (http://\S+)")
_VLLM_GRPC = re.compile(r"vllm\.grpc\.engine will be at grpc://(\S+)")
_START_SECONDS = 90.0


def stepwell(*arguments: str, directory: Path = ROOT) -> str:
    """Runs a command of `stepwell` in a directory, and returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        capture_output=True,
        cwd=directory,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Stack:
    """A running `stepwell up`. Its output is collected for the report of a failed test."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        directory: Path = ROOT,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if "STEPWELL" not in name}
        self.directory = directory
        self.output: list[str] = []
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.cli", "up", "--model", str(model)),
                *("--http-port", "0", "--grpc-port", "0", "--num-threads", "1", *flags),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=directory,
            env={**inherited, **(environ or {})},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        match = self._wait_ready()
        self.model, self.url, self.grpc = match.groups()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line.rstrip())

    def _wait_ready(self) -> re.Match[str]:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            for line in tuple(self.output):
                if (match := _READY.match(line)) is not None:
                    return match
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        self.close()
        raise AssertionError("not ready:\n" + "\n".join(self.output))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def admin_url(self) -> str:
        (url,) = _ADMIN.findall("\n".join(self.output))
        return str(url)

    @property
    def vllm_grpc(self) -> list[str]:
        """The addresses, host:port, at which the schedulers serve vllm.grpc.engine."""
        return _VLLM_GRPC.findall("\n".join(self.output))

    def pids(self) -> dict[str, int]:
        """Maps each running service's name, as in the output, to its process id."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        found = {}
        for child in children:
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
                environ = Path(f"/proc/{child}/environ").read_bytes().decode()
            except OSError:
                continue
            for service in SERVICES:
                if command[1:3] == ["-m", f"services.{service}"]:
                    pattern = rf"\bSTEPWELL_{service.upper()}_ADDRESS=unix:[^\0]+/([\w-]+)\.sock\0"
                    socket = re.search(pattern, environ)
                    found[service if socket is None else socket[1]] = int(child)
        return found

    def address(self, service: str) -> str:
        """The address of a service's Unix socket."""
        environ = Path(f"/proc/{self.pids()[service]}/environ").read_bytes().decode()
        (found,) = re.findall(rf"\bSTEPWELL_{service.upper()}_ADDRESS=(unix:[^\0]+)", environ)
        return str(found)

    def resident_bytes(self) -> dict[str, int]:
        sizes = {}
        for service, pid in self.pids().items():
            status = Path(f"/proc/{pid}/status").read_text()
            sizes[service] = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024
        return sizes

    def status(self) -> dict[str, Any]:
        """The statistics of the only replica. They are requested until they arrive, because the
        gateway's status lacks them if the replica does not reply within a second.
        """
        found: list[dict[str, Any]] = []

        def answered() -> bool:
            (replica,) = http_get(f"{self.url}/status").json()["replicas"]
            found.extend([replica["stats"]] if replica["stats"] else [])
            return bool(found)

        wait_for(answered)
        return found[0]

    def wait_until_nothing_is_held(self, seconds: float = 60) -> None:
        """Waits until no request runs or waits and no block is allocated. The blocks of a request
        may be freed only some time after its last token.
        """

        def nothing_is_held() -> bool:
            status = self.status()
            # A restarted gateway reports 0 for both numbers until it has the pool's state.
            is_free = status["num_free_blocks"] == status["num_usable_blocks"] > 0
            return is_free and not (status["num_running"] or status["num_waiting"])

        wait_for(nothing_is_held, seconds)

    def hit(self, service: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a service, by default SIGKILL, which simulates a crash."""
        os.kill(self.pids()[service], signum)

    def wait_until_back(self, service: str, killed_pid: int) -> None:
        """Waits until a killed service runs again and the gateway has a ready replica."""

        def back() -> bool:
            return self.pids().get(service, killed_pid) != killed_pid and self.healthy()

        wait_for(back, 60)

    def healthy(self) -> bool:
        try:
            return http_get(f"{self.url}/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)

    def close(self) -> None:
        """Ends `stepwell up`, even if it hangs or has failed."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
