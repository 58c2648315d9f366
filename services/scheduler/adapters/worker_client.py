"""The workers over gRPC: the same bytes to every rank, one stream each, steps in flight."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

import grpc
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.status import from_rpc_error
from services.scheduler.adapters.worker_messages import to_execute_request, to_step_output
from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.ports import WorkersLost

logger = logging.getLogger(__name__)

_ExecuteCall = grpc.aio.StreamStreamCall[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]
_Answer = asyncio.Future[worker_pb2.ExecuteResponse]

DESCRIBE_TIMEOUT_SECONDS = 5.0


class Rank:
    """One worker and its stream of steps. The stream that ends takes every waiting step with it."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        self._call: _ExecuteCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[_Answer] = deque()

    async def describe(self) -> worker_pb2.DescribeResponse:
        """What the worker runs. Raises StepwellError while it is away or still loading."""
        try:
            return await self._stub.Describe(
                worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def open(self) -> None:
        """Begins a new stream, with an empty batch."""
        self.close()
        self._call = self._stub.Execute()
        self._reader = asyncio.create_task(self._read(self._call), name=f"read {self.address}")

    def close(self) -> None:
        """Ends the stream; steps in flight fail."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._call is not None:
            self._call.cancel()
            self._call = None
        self._fail(f"the stream to the worker at {self.address} was closed")

    async def submit(self, request: worker_pb2.ExecuteRequest) -> _Answer:
        """Sends a step. Raises WorkersLost when the stream has ended."""
        if self._call is None:
            raise WorkersLost(f"the worker at {self.address} is away")
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise WorkersLost(f"the worker at {self.address} went away") from error
        return answer

    async def _read(self, call: _ExecuteCall) -> None:
        why = "it ended the stream"
        try:
            async for response in call:
                answer = self._waiting.popleft() if self._waiting else None
                if answer is not None and not answer.done():  # whoever waited may have given up
                    answer.set_result(response)
        except grpc.aio.AioRpcError as error:
            why = from_rpc_error(error).message
        self._call = None
        self._fail(f"the worker at {self.address} was lost: {why}")

    def _fail(self, message: str) -> None:
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(WorkersLost(message))
                answer.exception()  # whoever waits is told; nobody waiting is no error


class WorkerGroup:
    """An `Executor` over all ranks. They answer alike; one answer is taken."""

    def __init__(self, ranks: Sequence[Rank], step_timeout_seconds: float) -> None:
        self._ranks = ranks
        self._step_timeout_seconds = step_timeout_seconds
        self._generation = 0

    async def describe(self) -> list[worker_pb2.DescribeResponse]:
        """What each rank runs, in rank order. Raises StepwellError for the first that is away."""
        return list(await asyncio.gather(*(rank.describe() for rank in self._ranks)))

    def open(self, generation: int) -> None:
        """Begins a new generation on every rank."""
        self._generation = generation
        for rank in self._ranks:
            rank.open()

    def close(self) -> None:
        """Ends every stream."""
        for rank in self._ranks:
            rank.close()

    async def submit(self, plan: StepPlan, traceparent: str = "") -> asyncio.Future[StepOutput]:
        request = to_execute_request(plan, self._generation, traceparent)
        answers = [await rank.submit(request) for rank in self._ranks]
        return asyncio.create_task(self._collect(plan.step, answers))

    async def _collect(self, step: int, answers: list[_Answer]) -> StepOutput:
        alarm = asyncio.get_running_loop().call_later(
            self._step_timeout_seconds, self._give_up, step, answers
        )
        try:
            responses = [await answer for answer in answers]
        finally:
            alarm.cancel()
        return to_step_output(responses[0])

    def _give_up(self, step: int, answers: list[_Answer]) -> None:
        late = f"step {step} was not done within {self._step_timeout_seconds:g} s"
        for answer in answers:
            if not answer.done():
                answer.set_exception(WorkersLost(late))
                answer.exception()
