"""A gRPC stream of steps: reads steps, has the compute thread run them, and sends their outputs."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf

from stepwell.worker.v1 import worker_pb2

from services.common.errors import Aborted, StepwellError
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.converters import step_from_proto, step_output_to_proto
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.telemetry import StepTracer
from services.worker.core.batch.step_order import StepOrder
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import StepInput, StepOutput
from services.worker.core.worker import StepRunner

MAX_STEPS_IN_FLIGHT = 4
"""Maximum number of a stream's steps that have been read and whose outputs were not sent yet."""


@dataclass(slots=True)
class _PendingStep:
    """A step whose output was not sent yet. Times are readings of `time.perf_counter_ns`."""

    message: worker_pb2.ExecuteRequest
    step: StepInput
    arrived_nanos: int
    ready_nanos: int
    """When the step arrived, or, if a device computes it, when it was queued on the device."""
    started_nanos: int = 0
    ended_nanos: int = 0
    output: StepOutput | PendingOutput | None = None
    """The output. It is None until the step has run, or has been queued on a device."""
    error: BaseException | None = None
    """The error that prevented the step or made it fail."""
    answer: worker_pb2.ExecuteResponse | None = None
    """The response, if the compute thread has created it but could not send it at once."""
    downloaded: "asyncio.Future[StepOutput] | None" = None
    """The output of a step that a device computes. The download thread waits for it."""


@dataclass(eq=False)
class StepStream:
    """Runs the steps of one stream, over a batch that is initially empty.

    A task of the event loop reads steps. On a local stream, which has `write_at_once`, the compute
    thread itself sends the output of the oldest step before it runs the next step. Otherwise
    another thread would be woken, and would wait for the interpreter's lock until the compute
    thread has prepared the next step.

    In three cases the compute thread wakes the task that executes `run`, and this task sends the
    output: if there is no `write_at_once`, if the scheduler has not read earlier outputs, and if a
    device still computes the output.
    """

    runner: StepRunner
    compute: ComputeThread
    tracer: StepTracer
    metrics: WorkerMetrics
    write: Callable[[worker_pb2.ExecuteResponse], Awaitable[None]]
    write_at_once: Callable[[worker_pb2.ExecuteResponse], bool] | None
    """Sends a response from any thread. Returns False if it was not sent and must wait."""
    has_other_ranks: bool

    def __post_init__(self) -> None:
        self._closed = False
        self._error: StepwellError | None = None
        self._order = StepOrder()
        self._pending: deque[_PendingStep] = deque()
        """Steps whose outputs were not sent yet. Whoever sends an output removes its step."""
        self._last_ended_nanos: int | None = None
        """The end of the last step whose output was sent. It is None before the first output."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._awaits_answers = False
        """Whether the compute thread must wake the event loop after each output that it sends."""
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
    ) -> None:
        """Runs the steps in order, and sends their outputs while later steps are read."""
        await self._reset
        taking_in = asyncio.ensure_future(self._take_in(first, others))
        taking_in.add_done_callback(self._all_taken_in)
        try:
            while not taking_in.done() or self._pending:
                if self._error is not None:
                    raise self._error
                if taking_in.done():
                    taking_in.result()
                answer = self._oldest_answer()
                if answer is None:
                    await self._changed.wait()
                    self._changed.clear()
                else:
                    await self.write(answer)
                    self._pending.popleft()
                    self._has_room.set()
            taking_in.result()
        finally:
            self._closed = True
            taking_in.cancel()
            oldest = self._oldest()
            if oldest is not None and oldest.downloaded is not None:
                oldest.downloaded.cancel()

    async def _take_in(
        self, first: worker_pb2.ExecuteRequest, others: AsyncIterator[worker_pb2.ExecuteRequest]
    ) -> None:
        self._submit(first)
        async for message in others:
            self._submit(message)
            while len(self._pending) >= MAX_STEPS_IN_FLIGHT:
                self._has_room.clear()
                self._awaits_answers = True
                if len(self._pending) >= MAX_STEPS_IN_FLIGHT:
                    await self._has_room.wait()
                self._awaits_answers = False

    def _all_taken_in(self, _: "asyncio.Future[None]") -> None:
        self._awaits_answers = True
        self._changed.set()

    def _submit(self, message: worker_pb2.ExecuteRequest) -> None:
        arrived = time.perf_counter_ns()
        self._order.follow(message.generation, message.step, is_empty=not message.rows)
        step = step_from_proto(message, with_digest=self.has_other_ranks)
        pending = _PendingStep(message, step, arrived, arrived)
        self._pending.append(pending)
        self.compute.post(partial(self._run_step, pending), _allowed_seconds(message))

    def _oldest_answer(self) -> worker_pb2.ExecuteResponse | None:
        """Returns the oldest step's response, or None if its output is not known yet. If a device
        still computes the output, makes the download thread wait for it. Raises the error of a
        failed step.
        """
        pending = self._oldest()
        if pending is None:
            return None
        if pending.error is not None:
            raise pending.error
        if pending.answer is not None:
            return pending.answer
        output = pending.output
        if output is None or isinstance(output, StepOutput):
            return None if output is None else self._answer(pending, output)
        if pending.downloaded is None:
            pending.downloaded = self.compute.submit_wait(
                output.wait, _allowed_seconds(pending.message), self._changed.set
            )
        if not pending.downloaded.done():
            return None
        pending.ended_nanos = time.perf_counter_ns()
        return self._answer(pending, pending.downloaded.result())

    def _oldest(self) -> _PendingStep | None:
        try:
            return self._pending[0]
        except IndexError:  # the compute thread may have removed the last step
            return None

    def _run_step(self, pending: _PendingStep) -> None:
        """Runs a step in the compute thread. Sends its output at once if possible."""
        try:
            output = self._begin(pending)
            if isinstance(output, StepOutput) and self._can_answer_at_once(pending):
                answer = self._answer(pending, output)
                if self.write_at_once is not None and self.write_at_once(answer):
                    self._pending.popleft()
                    if self._awaits_answers:
                        self._wake()
                    return
                pending.answer = answer
            else:
                pending.output = output
        except BaseException as error:
            pending.error = error
        self._wake()

    def _can_answer_at_once(self, pending: _PendingStep) -> bool:
        return self.write_at_once is not None and not self._closed and self._pending[0] is pending

    def _begin(self, pending: _PendingStep) -> StepOutput | PendingOutput:
        """Runs a step, or queues it on a device. If it fails, drops the stream's later steps."""
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

    def _wake(self) -> None:
        """Wakes the tasks that read steps and send outputs. Callable from any thread."""
        with suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        self._changed.set()
        self._has_room.set()

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
