"""The worker's gRPC contract, implemented over a StepRunner."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

import grpc
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import Aborted, InvalidArgument, StepwellError, Unavailable
from services.common.pool.ids import MAX_GENERATION
from services.common.pool.lease import Lease
from services.common.pool.lease_proto import holder_from_proto
from services.common.request.structured_outputs_proto import structured_outputs_from_proto
from services.common.rpc.protocol import require_same_protocol
from services.common.telemetry.tracing import Tracing
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.converters import (
    description_to_proto,
    step_from_proto,
    step_output_to_proto,
)
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.telemetry import StepTracer
from services.worker.core.batch.step_order import StepOrder
from services.worker.core.errors import InvalidStep
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import StepInput, StepOutput
from services.worker.core.worker import StepRunner, Worker

logger = logging.getLogger(__name__)

MAX_STEPS_IN_FLIGHT = 4
"""Maximum number of a stream's steps that are read before the oldest step is answered."""

LEASE_GRACE_SECONDS = 2.0
"""Time after a stream's end in which only the same scheduler may open another."""

_Context = grpc.aio.ServicerContext[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Refuses calls with UNAVAILABLE until `open` is called. Then runs the steps of one stream."""

    def __init__(
        self,
        compute: ComputeThread,
        tracing: Tracing,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compute = compute
        self._tracing = tracing
        self._metrics = metrics
        self._lease = Lease("worker", LEASE_GRACE_SECONDS, clock)
        self._worker: Worker | None = None
        self._seen_generation = 0
        self._stream: _StepStream | None = None
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="preparing")

    def open(self, worker: Worker) -> None:
        self._worker = worker
        self._metrics.loaded(worker.description)

    def close(self, reason: StepwellError | None = None) -> None:
        """Refuses calls, and ends the open stream with `reason`, by default DRAINING."""
        self._worker = None
        if self._stream is not None:
            self._stream.end(reason or Unavailable("the worker is draining", reason="DRAINING"))

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: _Context
    ) -> worker_pb2.DescribeResponse:
        require_same_protocol("the scheduler", request.release, "worker")
        message = description_to_proto(self._loaded().description)
        message.seen_generation = self._seen_generation
        return message

    async def PrepareGrammar(
        self, request: worker_pb2.PrepareGrammarRequest, context: _Context
    ) -> worker_pb2.PrepareGrammarResponse:
        grammars = self._loaded().grammars
        if grammars is not None:
            wanted = structured_outputs_from_proto(request.structured_outputs)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._preparing, grammars.prepare, wanted)
        return worker_pb2.PrepareGrammarResponse()

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: _Context
    ) -> worker_pb2.LoadAdapterResponse:
        adapters, adapter = self._loaded().adapters, request.adapter
        if adapters is None:
            raise InvalidArgument("this worker serves no adapters: enable_lora", field="adapter")
        kept = frozenset(request.kept_digests)
        load = partial(adapters.load, adapter.digest, Path(adapter.path), kept)
        await asyncio.get_running_loop().run_in_executor(self._preparing, load)
        return worker_pb2.LoadAdapterResponse()

    async def Execute(  # type: ignore[override]  # the stubs know generators alone
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: _Context
    ) -> None:
        self._loaded()
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        worker, holder = self._loaded(), holder_from_proto(first.owner)
        self._lease.take(holder)
        try:
            self._begin_generation(first.generation)
            await self._run_steps(worker, first, request_iterator, context.write)
        except InvalidArgument as refusal:
            logger.warning("the stream of steps ends: %s", refusal.message)
            raise
        finally:
            self._lease.release(holder)

    def _begin_generation(self, generation: int) -> None:
        """Begins a generation, and ends the previous stream. Raises InvalidStep for an invalid
        generation.

        Raises Aborted if a newer generation has begun. This happens if a stream is handled late,
        for example because this process was suspended while two streams were opened.
        """
        if not 0 < generation < MAX_GENERATION:
            raise InvalidStep(f"generation: {generation} is none", field="generation")
        if generation < self._seen_generation:
            raise Aborted(
                f"generation {generation} is over: generation {self._seen_generation} has begun"
            )
        self._seen_generation = generation
        if self._stream is not None:
            self._stream.end(Aborted("a newer stream took the worker over"))

    async def _run_steps(
        self,
        worker: Worker,
        first: worker_pb2.ExecuteRequest,
        others: AsyncIterator[worker_pb2.ExecuteRequest],
        write: Callable[[worker_pb2.ExecuteResponse], Awaitable[None]],
    ) -> None:
        description = worker.description
        tracer = StepTracer(self._tracing, description.rank, description.pipeline_stage)
        self._metrics.stream_opened()
        has_other_ranks = description.world_size > 1
        stream = self._stream = _StepStream(
            worker.runner, self._compute, tracer, self._metrics, has_other_ranks=has_other_ranks
        )
        try:
            await stream.run(first, others, write)
        finally:
            stream.close()
            if self._stream is stream:
                self._stream = None

    def _loaded(self) -> Worker:
        if self._worker is None:
            raise Unavailable("the model is not loaded", retry_after_seconds=1.0)
        return self._worker


@dataclass(slots=True)
class _PendingStep:
    """A step that is not answered yet. Times are readings of `time.perf_counter_ns`."""

    message: worker_pb2.ExecuteRequest
    step: StepInput
    arrived_nanos: int
    ready_nanos: int
    """When the step arrived or, with a device, was queued on the device."""
    started_nanos: int = 0
    ended_nanos: int = 0
    begun: "asyncio.Future[StepOutput | PendingOutput]" = field(init=False)
    """Done when the step was run, or was queued on a device."""
    downloaded: "asyncio.Future[StepOutput] | None" = None
    """The step's output, if a device still computed it when `begun` was done."""

    def cancel(self) -> None:
        """Cancels the parts of the step that have not started."""
        self.begun.cancel()
        if self.downloaded is not None:
            self.downloaded.cancel()


@dataclass(eq=False)
class _StepStream:
    """The steps of one stream, over a batch that is initially empty.

    One task reads steps. The task that runs the stream answers them. Every event wakes this task,
    which then checks the oldest step. So a step needs only one wake-up and no new task. This
    matters because this thread and the compute thread share the interpreter's lock.
    """

    runner: StepRunner
    compute: ComputeThread
    tracer: StepTracer
    metrics: WorkerMetrics
    has_other_ranks: bool

    def __post_init__(self) -> None:
        self._closed = False
        self._error: StepwellError | None = None
        self._order = StepOrder()
        self._pending: deque[_PendingStep] = deque()
        self._last_ended_nanos: int | None = None
        """When the last answered step ended. It is None before the first answer."""
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._reset = self.compute.submit(self.runner.reset)

    def end(self, error: StepwellError) -> None:
        """Ends the stream with `error`, and drops steps that have not started."""
        self._closed = True
        if self._error is None:
            self._error = error
        self._changed.set()

    def close(self) -> None:
        """Drops steps that have not started."""
        self._closed = True

    async def run(
        self,
        first: worker_pb2.ExecuteRequest,
        others: AsyncIterator[worker_pb2.ExecuteRequest],
        write: Callable[[worker_pb2.ExecuteResponse], Awaitable[None]],
    ) -> None:
        """Runs steps in order, and writes their responses while further steps are read."""
        await self._reset
        taking_in = asyncio.ensure_future(self._take_in(first, others))
        taking_in.add_done_callback(lambda _: self._changed.set())
        try:
            while not taking_in.done() or self._pending:
                if self._error is not None:
                    raise self._error
                if taking_in.done():
                    taking_in.result()
                output = self._oldest_output()
                if output is None:
                    await self._changed.wait()
                    self._changed.clear()
                else:
                    pending = self._pending.popleft()
                    self._has_room.set()
                    await write(self._answer(pending, output))
            taking_in.result()
        finally:
            taking_in.cancel()
            for step in self._pending:
                step.cancel()

    async def _take_in(
        self, first: worker_pb2.ExecuteRequest, others: AsyncIterator[worker_pb2.ExecuteRequest]
    ) -> None:
        self._pending.append(self._submit(first))
        async for message in others:
            self._pending.append(self._submit(message))
            while len(self._pending) >= MAX_STEPS_IN_FLIGHT:
                self._has_room.clear()
                await self._has_room.wait()

    def _submit(self, message: worker_pb2.ExecuteRequest) -> _PendingStep:
        arrived = time.perf_counter_ns()
        self._order.follow(message.generation, message.step, is_empty=not message.rows)
        step = step_from_proto(message, with_digest=self.has_other_ranks)
        pending = _PendingStep(message, step, arrived, arrived)
        pending.begun = self.compute.submit(
            lambda: self._begin(pending), _allowed_seconds(message), self._changed.set
        )
        return pending

    def _oldest_output(self) -> StepOutput | None:
        """Returns the output of the oldest step, or None if it has not run yet or there is no step.
        If a device still computes the step, the download thread starts to wait for the output.
        """
        if not self._pending or not self._pending[0].begun.done():
            return None
        pending = self._pending[0]
        output = pending.begun.result()
        if isinstance(output, StepOutput):
            return output
        if pending.downloaded is None:
            pending.downloaded = self.compute.submit_wait(
                output.wait, _allowed_seconds(pending.message), self._changed.set
            )
        if not pending.downloaded.done():
            return None
        pending.ended_nanos = time.perf_counter_ns()
        return pending.downloaded.result()

    def _begin(self, pending: _PendingStep) -> StepOutput | PendingOutput:
        """Runs a step in the compute thread. If it fails, the stream's other steps are dropped."""
        if self._closed:
            raise Aborted("the stream ended before this step began")
        pending.started_nanos = time.perf_counter_ns()
        try:
            output = self.runner.begin(pending.step)
        except BaseException:
            self._closed = True
            raise
        pending.ended_nanos = time.perf_counter_ns()
        if not isinstance(output, StepOutput):
            pending.ready_nanos = pending.ended_nanos
        return output

    def _answer(self, pending: _PendingStep, output: StepOutput) -> worker_pb2.ExecuteResponse:
        arrived, ended = pending.arrived_nanos, pending.ended_nanos
        started = pending.started_nanos + output.waited_nanos
        epoch = time.time_ns() - time.perf_counter_ns()
        times = epoch + arrived, epoch + started, epoch + ended
        self.tracer.record(pending.message.traceparent, pending.step, times)
        num_tokens = sum(pending.step.num_scheduled_tokens.tolist())
        if len(pending.step.num_draft_tokens):  # the worker may have proposed fewer drafts
            num_tokens -= int(pending.step.num_draft_tokens.sum() - output.num_draft_tokens.sum())
        self.metrics.stepped(num_tokens, started - arrived, ended - started)
        last_ended, self._last_ended_nanos = self._last_ended_nanos, ended
        return step_output_to_proto(
            output,
            queue_nanos=started - arrived,
            execute_nanos=ended - started,
            slack_nanos=None if last_ended is None else last_ended - pending.ready_nanos,
        )


def _allowed_seconds(message: worker_pb2.ExecuteRequest) -> float:
    return message.timeout_millis / 1000 or inf
