"""Records spans of transactions and admissions, in a wrapper around the hot path."""

import time
from collections.abc import Callable

from opentelemetry.trace import SpanKind, Status, StatusCode
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.telemetry import names
from services.common.telemetry.trace_context import child_of, sampled_parent
from services.common.telemetry.tracing import Attributes, Tracing
from services.kvpool.core.pool_host import HostedPool

Apply = Callable[
    [HostedPool[kvpool_pb2.TransactResponse], kvpool_pb2.TransactRequest],
    kvpool_pb2.TransactResponse,
]


def traced(apply: Apply, tracing: Tracing) -> Apply:
    """Wraps the application of a transaction in spans. Without tracing it returns `apply` itself. A
    transaction's span is a child of the engine step that sent it. An admission's span is a child of
    its request's span. Messages without a trace context leave no span.
    """
    if not tracing.enabled:
        return apply

    def apply_traced(
        hosted: HostedPool[kvpool_pb2.TransactResponse], request: kvpool_pb2.TransactRequest
    ) -> kvpool_pb2.TransactResponse:
        started, answer, error = time.time_ns(), None, "a transaction of the pool failed"
        try:
            answer = apply(hosted, request)
        except Exception as raised:
            error = str(raised)
            raise
        finally:
            _record(
                tracing,
                names.SPAN_POOL_TRANSACT,
                request.traceparent,
                started,
                _described(request, answer) if request.traceparent else {},
                SpanKind.SERVER,
                Status() if answer is not None else Status(StatusCode.ERROR, error),
            )
        _record_admissions(tracing, request, answer, started)
        return answer

    return apply_traced


def _record(
    tracing: Tracing,
    name: str,
    traceparent: str,
    started_unix_nanos: int,
    attributes: Attributes,
    kind: SpanKind = SpanKind.INTERNAL,
    status: Status = Status(),  # noqa: B008 - immutable
) -> None:
    parent = sampled_parent(traceparent)
    if parent is not None:
        tracing.record(
            name,
            child_of(parent),
            parent,
            started_unix_nanos,
            time.time_ns(),
            attributes=attributes,
            kind=kind,
            status=status,
        )


def _described(
    request: kvpool_pb2.TransactRequest, answer: kvpool_pb2.TransactResponse | None
) -> Attributes:
    attributes: dict[str, str | int] = {names.ATTR_NUM_OPERATIONS: len(request.operations)}
    if answer is None:
        return attributes
    attributes[names.ATTR_GENERATION] = answer.generation
    attributes[names.ATTR_NUM_FREE_BLOCKS] = answer.num_free_blocks
    if answer.HasField("stop"):
        name = kvpool_pb2.StopReason.Name(answer.stop.reason)
        attributes[names.ATTR_STOP_REASON] = name.removeprefix("STOP_REASON_").lower()
    return attributes


def _record_admissions(
    tracing: Tracing,
    request: kvpool_pb2.TransactRequest,
    answer: kvpool_pb2.TransactResponse,
    started_unix_nanos: int,
) -> None:
    """Records a span for each sampled request that was admitted. No span is recorded if blocks were
    missing, because the admission is tried again in each step.
    """
    for index, result in enumerate(answer.results):
        if result.WhichOneof("result") != "admit":
            continue
        done = result.admit.groups[0].num_blocks
        for item, admission in enumerate(request.operations[index].admit.admissions[: len(done)]):
            if admission.traceparent:
                blocks = sum(group.num_blocks[item] for group in result.admit.groups)
                attributes = {
                    names.ATTR_NUM_CACHED_TOKENS: admission.num_hit_tokens,
                    names.ATTR_NUM_BLOCKS: blocks,
                }
                _record(
                    tracing,
                    names.SPAN_POOL_ADMIT,
                    admission.traceparent,
                    started_unix_nanos,
                    attributes,
                )
