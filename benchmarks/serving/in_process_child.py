"""Runs the target "one process", which contains the code of all services, as a child process."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.load import Load, RequestTimes


class InProcessChild:
    """Runs `python -m benchmarks.common.in_process` inside `async with`.

    The context is entered when the process is ready.
    """

    def __init__(self, model: Path, num_blocks: int) -> None:
        self._flags = ("--model", str(model), "--num-blocks", str(num_blocks))
        self._process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """The process id of the child process."""
        return self._process.pid

    async def __aenter__(self) -> "InProcessChild":
        await asyncio.to_thread(self._start)
        await self._read_line()
        return self

    def _start(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "benchmarks.common.in_process", *self._flags),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Compute threads that wait do not spin, as in the worker's process.
            env={"OMP_WAIT_POLICY": "passive", **os.environ},
        )

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await asyncio.to_thread(self._process.wait)

    async def run(self, load: Load) -> list[RequestTimes]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(load)).encode() + b"\n")
        self._process.stdin.flush()
        return [RequestTimes(**taken) for taken in json.loads(await self._read_line())]

    async def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            raise RuntimeError(f"the one process ended with {self._process.wait()}")
        return line
