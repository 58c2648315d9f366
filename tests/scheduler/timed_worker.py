"""A worker without a model. Its steps take a given time, and it reports measured times."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from stepwell.worker.v1 import worker_pb2

from services.scheduler.adapters.replica import ReplicaShape
from tests.scheduler.fake_worker import BLOCK_SIZE, FakeWorker
from tests.scheduler.paged_model import PagedModel

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class Ran:
    """A step, with its times of arrival, start and end, in seconds."""

    message: worker_pb2.ExecuteRequest
    arrived: float
    began: float
    ended: float


class TimedWorker(FakeWorker):
    """One rank. A step that arrives while another runs begins when the other ends."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self.step_seconds = step_seconds
        self.ran: list[Ran] = []

    async def Execute(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.ExecuteRequest],
        context: _Context,  # noqa: ARG002
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        groups = ReplicaShape(self.description, self.description.num_blocks).groups
        model = PagedModel(BLOCK_SIZE, self.description.max_num_seqs, groups=groups)
        come: asyncio.Queue[tuple[worker_pb2.ExecuteRequest, float]] = asyncio.Queue()

        async def read() -> None:
            async for step in request_iterator:
                come.put_nowait((step, time.monotonic()))

        reading = asyncio.create_task(read())
        last_ended: float | None = None
        try:
            while True:
                step, arrived = await come.get()
                began = time.monotonic()
                response = self._run(model, step)
                await asyncio.sleep(self.step_seconds if step.rows else 0)
                ended = time.monotonic()
                if last_ended is not None:
                    response.slack_nanos = round(1e9 * (last_ended - arrived))
                self.ran.append(Ran(step, arrived, began, ended))
                last_ended = ended
                yield response
        finally:
            reading.cancel()
