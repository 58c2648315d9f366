"""A worker without a model in a separate process, which exits in any step that contains a fatal
token, and is then restarted. The process runs `python -m tests.scheduler.dying_worker ADDRESS
TOKEN`.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from stepwell.worker.v1 import worker_pb2

from services.common.pool.block_hash import unpack_token_ids
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.paged_model import PagedModel

ROOT = Path(__file__).parents[2]


class DyingWorker:
    """Starts the process, and restarts it after each death until it is stopped."""

    def __init__(self, poison: int) -> None:
        self.num_deaths = 0
        self._poison = poison
        self._directory = tempfile.TemporaryDirectory(prefix="sw")
        self._process: asyncio.subprocess.Process | None = None
        self._supervising: asyncio.Task[None] | None = None

    async def start(self) -> str:
        self._supervising = asyncio.create_task(self._supervise())
        return self._address

    async def stop(self) -> None:
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait({self._supervising})
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._directory.cleanup()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    @property
    def _address(self) -> str:
        return f"unix:{Path(self._directory.name) / 'worker'}"

    async def _supervise(self) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "gen")])
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __name__, self._address, str(self._poison)),
                stdin=asyncio.subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
            )
            await self._process.wait()
            self.num_deaths += 1


class _Mortal(FakeWorker):
    def __init__(self, address: str, poison: int) -> None:
        super().__init__(num_blocks=200)
        self._address = address
        self._poison = poison

    def _run(
        self, model: PagedModel, step: worker_pb2.ExecuteRequest
    ) -> worker_pb2.ExecuteResponse:
        for request in step.new_requests:
            if self._poison in unpack_token_ids(request.token_ids):
                os._exit(1)
        return super()._run(model, step)


async def _main(address: str, poison: int) -> None:
    await _Mortal(address, poison).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2])))
