"""The worker's contract over a runner."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import Aborted, StepwellError, Unavailable
from services.common.telemetry import Tracing
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.converters import (
    description_to_message,
    output_to_message,
    step_from_message,
)
from services.worker.adapters.telemetry import StepTimes, StepTracer
from services.worker.core.engine import Engine
from services.worker.core.lookahead import PendingOutput
from services.worker.core.runner import Runner
from services.worker.core.step import StepInput, StepOutput

MAX_STEPS_IN_FLIGHT = 4
"""Steps of a stream that are taken in before the oldest is answered; further ones wait outside."""

_Context = grpc.aio.ServicerContext[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Answers UNAVAILABLE until `open`; then one stream at a time drives the engine."""

    def __init__(self, compute: ComputeThread, tracing: Tracing) -> None:
        self._compute = compute
        self._tracing = tracing
        self._engine: Engine | None = None
        self._stream: _StepStream | None = None

    def open(self, engine: Engine) -> None:
        """From here on calls are answered."""
        self._engine = engine

    def close(self, reason: StepwellError | None = None) -> None:
        """Ends the stream that is open, by default since the worker drains, and refuses calls."""
        self._engine = None
        if self._stream is not None:
            self._stream.end(reason or Unavailable("the worker is draining"))

    async def Describe(
        self,
        request: worker_pb2.DescribeRequest,
        context: _Context,
    ) -> worker_pb2.DescribeResponse:
        """See the contract."""
        return description_to_message(self._loaded().description)

    async def Execute(
        self,
        request_iterator: AsyncIterator[worker_pb2.ExecuteRequest],
        context: _Context,
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        """See the contract."""
        engine = self._loaded()
        if self._stream is not None:
            self._stream.end(Aborted("a newer stream took the worker over"))
        tracer = StepTracer(self._tracing, engine.description.rank)
        stream = self._stream = _StepStream(engine.runner, self._compute, tracer)
        try:
            async with aclosing(stream.responses(request_iterator)) as responses:
                async for response in responses:
                    yield response
        finally:
            stream.close()
            if self._stream is stream:
                self._stream = None

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise Unavailable("the model is not loaded", retry_after_seconds=1.0)
        return self._engine


@dataclass(frozen=True, slots=True)
class _BegunStep:
    """A step that was run, or queued on a device, and when."""

    output: StepOutput | PendingOutput
    started_nanos: int
    ended_nanos: int


@dataclass(frozen=True, slots=True)
class _RunStep:
    """A step that was run, and when, by the clock that never goes back, in nanoseconds."""

    output: StepOutput
    started_nanos: int
    ended_nanos: int


@dataclass(frozen=True, slots=True)
class _PendingStep:
    message: worker_pb2.ExecuteRequest
    step: StepInput
    arrived_nanos: int
    run: "asyncio.Future[_RunStep]"


class _StepStream:
    """The steps of one stream. It begins with an empty batch."""

    def __init__(self, runner: Runner, compute: ComputeThread, tracer: StepTracer) -> None:
        self._runner = runner
        self._compute = compute
        self._tracer = tracer
        self._closed = False
        self._ended: asyncio.Future[StepwellError] = asyncio.get_running_loop().create_future()
        self._reset = compute.submit(runner.reset)

    def end(self, error: StepwellError) -> None:
        """Makes the stream fail with `error`; steps that have not begun are dropped."""
        self._closed = True
        if not self._ended.done():
            self._ended.set_result(error)

    def close(self) -> None:
        """Drops steps that have not begun."""
        self._closed = True
        self._tracer.close()

    async def responses(
        self, requests: AsyncIterator[worker_pb2.ExecuteRequest]
    ) -> AsyncGenerator[worker_pb2.ExecuteResponse, None]:
        """Runs steps as they come and answers them in order, taking in the next meanwhile."""
        await self._reset
        pending: deque[_PendingStep] = deque()
        messages = aiter(requests)
        reading: asyncio.Future[worker_pb2.ExecuteRequest] | None = _read(messages)
        try:
            while reading is not None or pending:
                waiting: set[asyncio.Future[Any]] = {self._ended}
                if reading is not None and len(pending) < MAX_STEPS_IN_FLIGHT:
                    waiting.add(reading)
                if pending:
                    waiting.add(pending[0].run)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if self._ended.done():
                    raise self._ended.result()
                if reading is not None and reading in waiting and reading.done():
                    try:
                        pending.append(self._submit(reading.result()))
                        reading = _read(messages)
                    except StopAsyncIteration:
                        reading = None
                if pending and pending[0].run.done():
                    yield self._answer(pending.popleft())
        finally:
            if reading is not None:
                reading.cancel()
            for step in pending:
                step.run.cancel()

    def _submit(self, message: worker_pb2.ExecuteRequest) -> _PendingStep:
        arrived = time.perf_counter_ns()
        step = step_from_message(message)
        begun = self._compute.submit(lambda: self._begin(step))
        return _PendingStep(message, step, arrived, asyncio.ensure_future(self._finish(begun)))

    def _begin(self, step: StepInput) -> _BegunStep:
        """In the compute thread. A step that fails closes the stream for those behind it."""
        if self._closed:
            raise Aborted("the stream ended before this step began")
        started = time.perf_counter_ns()
        try:
            output = self._runner.begin(step)
        except BaseException:
            self._closed = True
            raise
        return _BegunStep(output, started, time.perf_counter_ns())

    async def _finish(self, beginning: "asyncio.Future[_BegunStep]") -> _RunStep:
        """Waits for what a device still computes, while the step behind is begun."""
        begun = await beginning
        output, ended = begun.output, begun.ended_nanos
        if isinstance(output, PendingOutput):
            output = await self._compute.submit_wait(output.wait)
            ended = time.perf_counter_ns()
        return _RunStep(output, begun.started_nanos, ended)

    def _answer(self, pending: _PendingStep) -> worker_pb2.ExecuteResponse:
        run = pending.run.result()
        epoch = time.time_ns() - time.perf_counter_ns()
        self._tracer.record(
            pending.message,
            pending.step,
            run.output,
            StepTimes(
                epoch + pending.arrived_nanos, epoch + run.started_nanos, epoch + run.ended_nanos
            ),
        )
        return output_to_message(
            run.output,
            queue_nanos=run.started_nanos - pending.arrived_nanos,
            execute_nanos=run.ended_nanos - run.started_nanos,
        )


def _read(
    messages: AsyncIterator[worker_pb2.ExecuteRequest],
) -> "asyncio.Future[worker_pb2.ExecuteRequest]":
    async def read() -> worker_pb2.ExecuteRequest:
        return await anext(messages)

    return asyncio.ensure_future(read())
