"""The ports of the engine with a client span around each use of them."""

import asyncio
from collections.abc import Awaitable, Sequence

from opentelemetry.trace import Span, SpanKind

from services.common import names
from services.common.pool_operations import Operation, Outcome
from services.common.telemetry import Tracing, ended, traceparent_of
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.ports import Executor, KVPool


class TracedPool:
    """A `KVPool` whose transactions are children of the step they belong to."""

    def __init__(self, pool: KVPool, tracing: Tracing) -> None:
        self._pool = pool
        self._tracing = tracing

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        if not traceparent:
            return await self._pool.transact(operations)
        span = self._tracing.child(
            names.SPAN_STEP_TRANSACT,
            traceparent,
            kind=SpanKind.CLIENT,
            attributes={names.ATTR_NUM_OPERATIONS: len(operations)},
        )
        with ended(span):
            outcome = await self._pool.transact(operations, traceparent_of(span))
            span.set_attribute(names.ATTR_NUM_FREE_BLOCKS, outcome.num_free_blocks)
            if outcome.stop is not None:
                span.set_attribute(names.ATTR_STOP_REASON, outcome.stop.reason.value)
            return outcome


class TracedExecutor:
    """An `Executor` whose steps are timed from their sending to their answer."""

    def __init__(self, executor: Executor, tracing: Tracing) -> None:
        self._executor = executor
        self._tracing = tracing

    async def submit(
        self, plan: SchedulerOutput, traceparent: str = ""
    ) -> asyncio.Future[ModelRunnerOutput]:
        if not traceparent:
            return await self._executor.submit(plan)
        span = self._tracing.child(
            names.SPAN_STEP_EXECUTE,
            traceparent,
            kind=SpanKind.CLIENT,
            attributes={names.ATTR_STEP: plan.step},
        )
        try:
            answer = await self._executor.submit(plan, traceparent_of(span))
        except Exception as error:
            span.record_exception(error)
            span.end()
            raise
        return asyncio.create_task(_answered(span, answer))


async def _answered(span: Span, answer: Awaitable[ModelRunnerOutput]) -> ModelRunnerOutput:
    with ended(span):
        return await answer
