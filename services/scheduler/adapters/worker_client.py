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

DESCRIBE_TIMEOUT_SECONDS = 5.0


class _Step:
    """A step that was sent. `output` resolves when the last rank has answered: they answer alike,
    and one answer is taken. A rank that is lost, or late, fails it.
    """

    def __init__(self, number: int, num_ranks: int, timeout_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.output: asyncio.Future[StepOutput] = loop.create_future()
        self._num_missing = num_ranks
        self._alarm = loop.call_later(timeout_seconds, self._give_up, number, timeout_seconds)

    def answered(self, response: worker_pb2.ExecuteResponse) -> None:
        """A rank is done."""
        self._num_missing -= 1
        if not self._num_missing:
            self._alarm.cancel()
            if not self.output.done():  # whoever waited may have given up
                self._resolve(response)

    def _give_up(self, number: int, timeout_seconds: float) -> None:
        self.fail(f"step {number} was not done within {timeout_seconds:g} s")

    def _resolve(self, response: worker_pb2.ExecuteResponse) -> None:
        try:
            self.output.set_result(to_step_output(response))
        except ValueError as error:  # arrays that are none: whoever waits fails by it
            self.output.set_exception(error)

    def fail(self, message: str) -> None:
        """There will be no answer."""
        self._alarm.cancel()
        if not self.output.done():
            self.output.set_exception(WorkersLost(message))
            self.output.exception()  # whoever waits is told; nobody waiting is no error


class Rank:
    """One worker and its stream of steps. The stream that ends takes every waiting step with it."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self._stub = worker_pb2_grpc.WorkerStub(channel)
        self._call: _ExecuteCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: deque[_Step] = deque()

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

    async def submit(self, request: worker_pb2.ExecuteRequest, step: _Step) -> None:
        """Sends a step. Raises WorkersLost when the stream has ended."""
        if self._call is None:
            raise WorkersLost(f"the worker at {self.address} is away")
        self._waiting.append(step)
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise WorkersLost(f"the worker at {self.address} went away") from error

    async def _read(self, call: _ExecuteCall) -> None:
        why = "it ended the stream"
        try:
            async for response in call:
                if self._waiting:
                    self._waiting.popleft().answered(response)
        except grpc.aio.AioRpcError as error:
            why = from_rpc_error(error).message
        self._call = None
        self._fail(f"the worker at {self.address} was lost: {why}")

    def _fail(self, message: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(message)


class WorkerGroup:
    """An `Executor` over all ranks."""

    def __init__(self, ranks: Sequence[Rank], step_timeout_seconds: float) -> None:
        self._ranks = ranks
        self._step_timeout_seconds = step_timeout_seconds
        self._generation = 0

    async def describe(self) -> list[worker_pb2.DescribeResponse]:
        """What each rank runs, in rank order. Raises StepwellError for the first that is away."""
        return list(await asyncio.gather(*(rank.describe() for rank in self._ranks)))

    async def open(self, generation: int) -> None:
        """Begins a new generation on every rank. Raises WorkersLost.

        Several ranks are sent a step of nothing: one that still waits for the others, in a step
        that not all were sent before their streams ended, learns from them that it is over, even
        if there is nothing to compute for long.
        """
        self._generation = generation
        for rank in self._ranks:
            rank.open()
        if len(self._ranks) > 1:
            await self._send(0, worker_pb2.ExecuteRequest(generation=generation))

    def close(self) -> None:
        """Ends every stream."""
        for rank in self._ranks:
            rank.close()

    async def submit(self, plan: StepPlan, traceparent: str = "") -> asyncio.Future[StepOutput]:
        request = to_execute_request(plan, self._generation, traceparent)
        return await self._send(plan.step, request)

    async def _send(
        self, number: int, request: worker_pb2.ExecuteRequest
    ) -> asyncio.Future[StepOutput]:
        step = _Step(number, len(self._ranks), self._step_timeout_seconds)
        for rank in self._ranks:
            await rank.submit(request, step)
        return step.output
