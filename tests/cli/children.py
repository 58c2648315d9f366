"""Small real programs that a supervisor can look after."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from services.cli.child import ChildSpec
from services.cli.supervisor import Supervisor

# Serves until SIGTERM, then writes its name to the journal and takes its time to end.
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

IGNORE_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
while True:
    time.sleep(60)
"""


def program(name: str, code: str, ready: Path, *arguments: str) -> ChildSpec:
    """A Python program, which is ready once it has made the file `ready`."""
    return ChildSpec(
        name=name,
        command=(sys.executable, "-I", "-S", "-c", code, *arguments),
        environ=os.environ,
        until_ready=partial(until, ready.exists),
    )


def server(name: str, directory: Path, stop_seconds: float = 0.0) -> ChildSpec:
    """A well-behaved child; `journal` in the directory gets its name when it is told to stop."""
    ready = directory / f"{name}.ready"
    return program(
        name, SERVE, ready, name, str(ready), str(directory / "journal"), str(stop_seconds)
    )


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Journal:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.readies: list[tuple[str, int]] = []
        self.deaths: list[tuple[str, str, list[str], float]] = []
        self.stops: list[str] = []
        self.kills: list[str] = []

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def ready(self, name: str, seconds: float, num_restarts: int) -> None:
        assert seconds >= 0
        self.readies.append((name, num_restarts))

    def died(self, name: str, status: str, tail: Sequence[str], delay_seconds: float) -> None:
        self.deaths.append((name, status, list(tail), delay_seconds))

    def stopping(self, name: str) -> None:
        self.stops.append(name)

    def killed(self, name: str, seconds: float) -> None:
        assert seconds > 0
        self.kills.append(name)


async def started(supervisor: Supervisor) -> asyncio.Task[None]:
    """Runs a supervisor until all of its children are ready."""
    task = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(supervisor.all_ready.wait())
    await asyncio.wait({task, ready}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert supervisor.all_ready.is_set()
    return task
