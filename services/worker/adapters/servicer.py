"""Implements the worker's gRPC service, with a StepRunner that runs the steps."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import Aborted, InvalidArgument, StepwellError, Unavailable
from services.common.pool.ids import MAX_GENERATION
from services.common.pool.lease import Lease
from services.common.pool.messages import holder_from_proto
from services.common.request.messages import structured_outputs_from_proto
from services.common.rpc.protocol import require_same_protocol
from services.common.telemetry.tracing import Tracing
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.converters import description_to_proto
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.step_stream import StepStream
from services.worker.adapters.telemetry import StepTracer
from services.worker.core.errors import DeviceFailed, InvalidStep
from services.worker.core.worker import Worker

logger = logging.getLogger(__name__)

LEASE_GRACE_SECONDS = 2.0
"""For this time after a stream's end, only the scheduler that opened it may open the next."""

_Context = grpc.aio.ServicerContext[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Refuses calls with UNAVAILABLE until `open` is called. Then runs one stream at a time."""

    def __init__(self, compute: ComputeThread, tracing: Tracing, metrics: WorkerMetrics) -> None:
        self._compute = compute
        self._tracing = tracing
        self._metrics = metrics
        self._lease = Lease("worker", LEASE_GRACE_SECONDS, time.monotonic)
        self._worker: Worker | None = None
        self._seen_generation = 0
        self._stream: StepStream | None = None
        self.device_failed: Callable[[DeviceFailed], object] = lambda _: None
        """Called if this process must end, because its device has failed."""
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="preparing")

    def open(self, worker: Worker) -> None:
        self._worker = worker
        self._metrics.loaded(worker.description)

    def close(self, reason: StepwellError | None = None) -> None:
        """Refuses calls, and ends the open stream with `reason`. The default reason is DRAINING."""
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
            raise InvalidArgument(
                "this worker serves no adapters: start it with --enable-lora", field="adapter"
            )
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
            await self._run_steps(worker, first, request_iterator, context)
        except InvalidArgument as refusal:
            logger.warning(
                "the stream of steps from the scheduler is closed, because a step is invalid: %s",
                refusal.message,
            )
            raise
        except DeviceFailed as failure:
            self.device_failed(failure)
            raise
        finally:
            self._lease.release(holder)

    def _begin_generation(self, generation: int) -> None:
        """Begins a generation (the KV pool's number, which increases when a scheduler opens the
        pool again), and ends the stream of the previous generation. Raises InvalidStep for a number
        out of range.

        Raises Aborted if a newer generation has already begun, as when two streams were opened
        while this process was suspended.
        """
        if not 0 < generation < MAX_GENERATION:
            raise InvalidStep(
                f"generation: {generation} is not from 1 to {MAX_GENERATION - 1}",
                field="generation",
            )
        if generation < self._seen_generation:
            raise Aborted(
                f"generation {generation} has ended, because the newer generation "
                f"{self._seen_generation} has begun"
            )
        self._seen_generation = generation
        if self._stream is not None:
            self._stream.end(
                Aborted(
                    "the stream of steps was ended, because the scheduler has opened a newer stream"
                )
            )

    async def _run_steps(
        self,
        worker: Worker,
        first: worker_pb2.ExecuteRequest,
        others: AsyncIterator[worker_pb2.ExecuteRequest],
        context: _Context,
    ) -> None:
        description = worker.description
        tracer = StepTracer(self._tracing, description.rank, description.pipeline_stage)
        self._metrics.stream_opened()
        stream = self._stream = StepStream(
            worker.runner,
            self._compute,
            tracer,
            self._metrics,
            context.write,
            getattr(context, "write_at_once", None),
            has_other_ranks=description.world_size > 1,
        )
        try:
            await stream.run(first, others)
        finally:
            stream.close()
            if self._stream is stream:
                self._stream = None

    def _loaded(self) -> Worker:
        if self._worker is None:
            raise Unavailable("the worker has not loaded the model yet", retry_after_seconds=1.0)
        return self._worker
