"""Load generators in separate processes, so that they do not disturb each other's times."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Self

from benchmarks.soak.load_generator import Sending, Sent

_COMMAND = (sys.executable, "-m", "benchmarks.soak.load_generator")
_LINE_BYTES = 64 * 2**20


class Generators:
    """Load generators. A process sends one load after another, and ends with `async with`."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            await _end(process)

    async def generate(self, sendings: Sequence[Sending]) -> list[Sent]:
        """Runs a load generator in its own process for each of `sendings`. Returns their outcomes.

        All load generators begin to send at the same time.
        """
        while len(self._processes) < len(sendings):
            self._processes.append(await _spawn())
        processes = self._processes[: len(sendings)]
        for process, sending in zip(processes, sendings, strict=True):
            await _tell(process, json.dumps(asdict(sending)))
        for process in processes:
            await _line(process)
        for process in processes:
            await _tell(process, "go")
        return [Sent(**json.loads(await _line(process))) for process in processes]


@asynccontextmanager
async def sink() -> AsyncIterator[str]:
    """Runs a server that refuses every request at almost no cost, and yields its address."""
    process = await _spawn("--sink")
    try:
        yield f"127.0.0.1:{int(await _line(process))}"
    finally:
        await _end(process)


async def _spawn(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *_COMMAND,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
    )


async def _tell(process: asyncio.subprocess.Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    """Reads a line of the process's output. Raises RuntimeError if the process has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a load generator ended with {await process.wait()}")
    return line


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
