"""A replica with a worker that computes nothing: pool, scheduler and worker, each a process."""

import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.processes import end, environment, spawn, until_serving
from services.cli.health import until_ready

BLOCK_SIZE = 16
"""Tokens per block of the dummy worker's KV cache."""
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The settings of a replica."""

    max_num_seqs: int
    num_blocks: int
    async_scheduling: bool
    otlp_endpoint: str = ""
    trace_sample_ratio: float = 1.0


class DummyReplica:
    """Runs a scheduler and a pool with default settings, and a dummy worker, in `async with`."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._options = options
        self._directory = tempfile.TemporaryDirectory(prefix="stepwell-bench-")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def scheduler(self) -> str:
        return self._socket("scheduler")

    def pids(self) -> dict[str, int]:
        """The process id of each service."""
        return {name: process.pid for name, process in self._processes.items()}

    async def __aenter__(self) -> "DummyReplica":
        options = self._options
        limits = ("--max-num-seqs", options.max_num_seqs, "--num-blocks", options.num_blocks)
        traces = ("--otlp-endpoint", options.otlp_endpoint)
        asynchronous = "--async-scheduling" if options.async_scheduling else "--no-async-scheduling"
        sample = (
            *("--trace-sample-ratio", options.trace_sample_ratio),
            *("--trace-step-sample-ratio", 1.0),
        )
        connect = ("--kvpool", self._socket("kvpool"), "--workers", self._socket("worker"))
        self._start("worker", "benchmarks.step.dummy_worker", *limits, *traces)
        self._start("kvpool", "services.kvpool", *traces)
        self._start("scheduler", "services.scheduler", *connect, asynchronous, *traces, *sample)
        try:
            ready = until_ready(self.scheduler)
            await until_serving(self._processes, self._log, ready, START_SECONDS)
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stop)

    async def set_step(self, millis: float, num_bare_steps: int) -> list[int]:
        """Sets the duration of the worker's steps, and runs a loop of bare steps in the worker.

        Returns the end time of each bare step, in nanoseconds of the monotonic clock.
        """
        ended: list[int] = await self._ask({"step_millis": millis, "bare_steps": num_bare_steps})
        return ended

    async def served(self) -> list[tuple[int, int]]:
        """The end time and the number of requests of each decode step since the last call or
        `set_step`. Times are in nanoseconds of the monotonic clock.
        """
        return [(ended, count) for ended, count in await self._ask({})]

    async def _ask(self, command: dict[str, Any]) -> list[Any]:
        worker = self._processes["worker"]
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(command).encode() + b"\n")
        worker.stdin.flush()
        line = await asyncio.to_thread(worker.stdout.readline)
        if not line:
            raise RuntimeError(f"the dummy worker ended with {worker.wait()}")
        answer: list[Any] = json.loads(line)
        return answer

    def _start(self, name: str, module: str, *flags: object) -> None:
        address = ("--address", self._socket(name))
        command = (sys.executable, "-m", module, *map(str, (*address, *flags)))
        pipes = name == "worker"
        self._processes[name] = spawn(command, environment(), self._log(name), pipes=pipes)

    def _log(self, name: str) -> Path:
        return Path(self._directory.name) / f"{name}.log"

    def _socket(self, name: str) -> str:
        return f"unix:{self._directory.name}/{name}.sock"

    def _stop(self) -> None:
        """Stops the services. The worker sends its last spans when its standard input ends."""
        end([self._processes["scheduler"]])
        end([self._processes["kvpool"]])
        worker = self._processes["worker"]
        if worker.stdin is not None:
            worker.stdin.close()
        end([worker], ask=False)
        self._directory.cleanup()
