"""Small real programs that the supervisor of `stepwell up` runs as child processes in tests."""

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from services.cli.health import until_ready, until_silent
from services.cli.processes.child import ChildSpec
from services.cli.processes.run_directory import ensure_directory
from services.cli.processes.supervisor import Supervisor
from tests.waiting import until

# Runs until SIGTERM, then writes its name to the file `journal` and waits before it ends.
SERVE = """
import signal, sys, time
name, ready, journal, seconds = sys.argv[1:]
def stop(*_):
    with open(journal, "a") as file:
        file.write(name + "\\n")
    time.sleep(float(seconds))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print(name, "serves", flush=True)
open(ready, "w").close()
while True:
    time.sleep(60)
"""

# Answers health checks until the first SIGTERM, and ends at the second. Writes its name to the file
# `journal` at each SIGTERM.
LINGER = """
import asyncio, signal, sys
from services.common.rpc.server import GrpcServer
async def main():
    name, address, journal = sys.argv[1:]
    server, asked = GrpcServer(), asyncio.Semaphore(0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.release)
    await server.start(address)
    await server.set_ready(True)
    for _ in range(2):
        await asked.acquire()
        with open(journal, "a") as file:
            file.write(name + "\\n")
        await server.drain(0)
asyncio.run(main())
"""

# Answers health checks. After SIGUSR1 it is not live. SIGUSR2 blocks its event loop for a minute.
ANSWER_HEALTH = """
import asyncio, signal, sys, time
from services.common.rpc.server import GrpcServer
async def main():
    time.sleep(float(sys.argv[2]))
    server, loop, stop = GrpcServer(), asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(
        signal.SIGUSR1, lambda: asyncio.ensure_future(server.set_live(False))
    )
    loop.add_signal_handler(signal.SIGUSR2, time.sleep, 60)
    await server.start(sys.argv[1])
    await server.set_ready(True)
    await stop.wait()
    await server.drain(0)
asyncio.run(main())
"""

IGNORE_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
while True:
    time.sleep(60)
"""


def program(name: str, code: str, ready: Path, *arguments: str) -> ChildSpec:
    """A child that runs `code` and is ready once the program has created the file `ready`."""
    return ChildSpec(
        name=name,
        command=(sys.executable, "-I", "-S", "-c", code, *arguments),
        environ=os.environ,
        until_ready=partial(until, ready.exists),
    )


def server(name: str, directory: Path, stop_seconds: float = 0.0) -> ChildSpec:
    """A child that writes its name to `journal` at SIGTERM, and ends after `stop_seconds`."""
    ready = directory / f"{name}.ready"
    return program(
        name, SERVE, ready, name, str(ready), str(directory / "journal"), str(stop_seconds)
    )


def lingering_server(name: str, directory: Path) -> ChildSpec:
    """A child that ends at the second SIGTERM. At each SIGTERM it writes its name to the file
    `journal` of `directory`.
    """
    address = f"unix:{directory / name}.sock"
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", LINGER, name, address, str(directory / "journal")),
        environ=os.environ,
        until_ready=partial(until_ready, address),
        until_drained=partial(until_silent, address),
    )


def health_server(
    name: str, directory: Path, *, silence_seconds: float, start_seconds: float = 0.0
) -> ChildSpec:
    """A child that answers health checks at a socket in `directory`, beginning `start_seconds`
    after its start. If a test removes the directory, a restarted child creates it again.
    """
    address = f"unix:{directory / name}.sock"
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", ANSWER_HEALTH, address, str(start_seconds)),
        environ=os.environ,
        until_ready=partial(until_ready, address),
        liveness_address=address,
        silence_seconds=silence_seconds,
        prepare=partial(ensure_directory, directory),
    )


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Journal:
    """An observer of a supervisor that stores all events."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.readies: list[tuple[str, int]] = []
        self.deaths: list[tuple[str, str, list[str], float]] = []
        self.deaths_in_a_row: list[int] = []
        self.hangs: list[tuple[str, str]] = []
        self.stops: list[str] = []
        self.kills: list[str] = []

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def ready(self, name: str, seconds: float, num_restarts: int) -> None:
        assert seconds >= 0
        self.readies.append((name, num_restarts))

    def hung(self, name: str, reason: str) -> None:
        self.hangs.append((name, reason))

    def died(
        self, name: str, status: str, tail: Sequence[str], delay_seconds: float, num_deaths: int
    ) -> None:
        self.deaths.append((name, status, list(tail), delay_seconds))
        self.deaths_in_a_row.append(num_deaths)

    def stopping(self, name: str) -> None:
        self.stops.append(name)

    def killed(self, name: str, seconds: float) -> None:
        assert seconds > 0
        self.kills.append(name)


async def started(supervisor: Supervisor) -> asyncio.Task[None]:
    """Starts a supervisor, and waits until all its children are ready. Returns its task."""
    task = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(supervisor.all_ready.wait())
    await asyncio.wait({task, ready}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert supervisor.all_ready.is_set()
    return task
