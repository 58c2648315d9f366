"""Wraps the pool and the workers, and records a client span for each call in a sampled step."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from services.common.pool.operations import Operation, Outcome
from services.common.telemetry import names
from services.common.telemetry.trace_context import child_of, sampled_parent, traceparent_text
from services.common.telemetry.tracing import Tracing
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.ports import Executor, KVPool

_CANCELLED = "the step was lost"


class TracedPool:
    """A `KVPool` that records each transaction as a child span of its step."""

    def __init__(self, pool: KVPool, tracing: Tracing) -> None:
        self._pool = pool
        self._tracing = tracing

    def transact(
        self, operations: Sequence[Operation], traceparent: str = ""
    ) -> Coroutine[Any, Any, Outcome]:
        # Most steps are not traced. For these, the pool's own coroutine is returned.
        parent = sampled_parent(traceparent) if traceparent else None
        if parent is None:
            return self._pool.transact(operations)
        return self._traced(operations, parent)

    async def _traced(self, operations: Sequence[Operation], parent: SpanContext) -> Outcome:
        context, started = child_of(parent), time.time_ns()
        attributes: dict[str, str | int] = {names.ATTR_NUM_OPERATIONS: len(operations)}
        status = Status(StatusCode.ERROR, _CANCELLED)
        try:
            outcome = await self._pool.transact(operations, _text(context))
            attributes[names.ATTR_NUM_FREE_BLOCKS] = outcome.num_free_blocks
            if outcome.stop is not None:
                attributes[names.ATTR_STOP_REASON] = outcome.stop.reason.value
            status = Status()
            return outcome
        except Exception as error:
            status = Status(StatusCode.ERROR, str(error))
            raise
        finally:
            self._tracing.record(
                names.SPAN_STEP_TRANSACT,
                context,
                parent,
                started,
                time.time_ns(),
                kind=SpanKind.CLIENT,
                attributes=attributes,
                status=status,
            )


class TracedExecutor:
    """An `Executor` that records a span for each sampled step, from its sending to its output."""

    def __init__(self, executor: Executor, tracing: Tracing) -> None:
        self._executor = executor
        self._tracing = tracing
        self._open: dict[int, _Call] = {}

    def submit(
        self, plan: SchedulerOutput, traceparent: str = ""
    ) -> Coroutine[Any, Any, asyncio.Future[ModelRunnerOutput]]:
        parent = sampled_parent(traceparent) if traceparent else None
        if parent is None:
            return self._executor.submit(plan)
        return self._traced(plan, parent)

    async def _traced(
        self, plan: SchedulerOutput, parent: SpanContext
    ) -> asyncio.Future[ModelRunnerOutput]:
        call = self._open[plan.step] = _Call(child_of(parent), parent, time.time_ns())
        try:
            answer = await self._executor.submit(plan, _text(call.context))
        except BaseException as error:
            self.end(plan.step, str(error))
            raise
        answer.add_done_callback(lambda done: self._answered(plan.step, done))
        return answer

    def end(self, step: int, error: str | None = None) -> None:
        """Records the span of a step's execution, if it was not recorded yet. Must be called before
        the step's own span is recorded, because the callback of the step's output may run later.
        """
        call = self._open.pop(step, None)
        if call is not None:
            self._tracing.record(
                names.SPAN_STEP_EXECUTE,
                call.context,
                call.parent,
                call.started,
                time.time_ns(),
                kind=SpanKind.CLIENT,
                attributes={names.ATTR_STEP: step},
                status=Status() if error is None else Status(StatusCode.ERROR, error),
            )

    def _answered(self, step: int, done: asyncio.Future[ModelRunnerOutput]) -> None:
        error = None if done.cancelled() else done.exception()
        self.end(step, _CANCELLED if done.cancelled() else str(error) if error else None)


@dataclass(frozen=True, slots=True)
class _Call:
    context: SpanContext
    parent: SpanContext
    started: int


def _text(context: SpanContext) -> str:
    return traceparent_text(context.trace_id, context.span_id)
