"""The scheduler as a separate process. The pool and the worker run in the test's process."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.scheduler.v1 import scheduler_pb2_grpc

from services.common.rpc.channel import open_channel
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.serving_replica import SECONDS, Pool, until_serving

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class SchedulerProcess:
    """A process of `python -m services.scheduler`."""

    process: asyncio.subprocess.Process
    errors: list[str] = field(default_factory=list)

    @classmethod
    async def start(cls, *flags: str, **environ: str) -> "SchedulerProcess":
        """Starts the process. Its standard error is collected in `errors`."""
        clean = {name: value for name, value in os.environ.items() if "STEPWELL" not in name}
        path = os.pathsep.join([str(ROOT), str(ROOT / "gen")])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.scheduler", *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**clean, "PYTHONPATH": path, **environ},
        )
        return cls(process)

    async def wait(self) -> int:
        """Waits until the process ends by itself. Returns its exit status."""
        async with asyncio.timeout(SECONDS):
            _, errors = await self.process.communicate()
        self.errors += errors.decode().splitlines()
        assert self.process.returncode is not None
        return self.process.returncode

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.wait()


@dataclass(slots=True)
class Running:
    scheduler: SchedulerProcess
    stub: scheduler_pb2_grpc.SchedulerStub
    address: str


@asynccontextmanager
async def running_scheduler(
    *flags: str, worker: FakeWorker | None = None, pool: Pool | None = None, **environ: Any
) -> AsyncIterator[Running]:
    worker, pool = worker or FakeWorker(), pool or Pool()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sw"))
        address = f"unix:{Path(directory) / 'scheduler'}"
        pool_address, worker_address = await pool.start(), await worker.start()
        stack.push_async_callback(pool.stop)
        stack.push_async_callback(worker.stop)
        scheduler = await SchedulerProcess.start(
            *("--kvpool", pool_address, "--workers", worker_address, "--address", address),
            *flags,
            **environ,
        )
        stack.push_async_callback(scheduler.close)
        channel = await stack.enter_async_context(open_channel(address))
        await until_serving(channel)
        yield Running(scheduler, scheduler_pb2_grpc.SchedulerStub(channel), address)
