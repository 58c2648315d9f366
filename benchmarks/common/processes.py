"""Starts, watches and ends child processes of a benchmark."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from services.cli.processes import launcher

STOP_SECONDS = 15.0
_LOOK_AGAIN_SECONDS = 0.2
_TAIL_LINES = 15


def spawn(
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    pipes: bool = False,
    directory: Path | None = None,
    niceness: int = 0,
) -> subprocess.Popen[bytes]:
    """Starts a program. Must be called from the main thread.

    The program's working directory is `directory`, if given. Its output is written to `log`. If
    `pipes` is true, its standard input and output are pipes. `niceness` is added to this process's
    niceness. The kernel ends the program if this process is killed.
    """
    launch = (sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), str(niceness))
    with log.open("wb") as output:
        return subprocess.Popen(
            (*launch, *command),
            cwd=directory,
            env=dict(environ),
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else output,
            stderr=output,
        )


async def watch(
    processes: Mapping[str, subprocess.Popen[bytes]], log: Callable[[str], Path]
) -> None:
    """Waits until a process ends, and raises RuntimeError with the last lines of its log."""
    while True:
        for name, process in processes.items():
            if process.poll() is not None:
                lines = log(name).read_text(errors="replace").splitlines()
                tail = "\n".join(lines[-_TAIL_LINES:])
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{tail}")
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


async def until_serving(
    processes: Mapping[str, subprocess.Popen[bytes]],
    log: Callable[[str], Path],
    serving: Awaitable[None],
    seconds: float,
) -> None:
    """Waits until `serving` returns, which means that the processes serve. Raises TimeoutError
    after `seconds`, and an exception group with a RuntimeError if a process ends earlier.
    """
    async with asyncio.timeout(seconds), asyncio.TaskGroup() as waiting:
        watching = waiting.create_task(watch(processes, log))
        await serving
        watching.cancel()


def end(processes: Sequence[subprocess.Popen[bytes]], *, ask: bool = True) -> None:
    """Terminates processes or, if `ask` is False, waits until they end by themselves. After
    STOP_SECONDS kills the processes that still run.
    """
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
    """This process's environment, without variables that change Stepwell's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPWELL_")}
    return {**kept, "GRPC_VERBOSITY": "NONE"}
