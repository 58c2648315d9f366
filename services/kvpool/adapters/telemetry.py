"""Spans of transactions and admissions, in a wrapper around the servicer's hot path."""

import time
from collections.abc import Callable

from opentelemetry.trace import Span, SpanKind
from stepwell.kvpool.v1 import kvpool_pb2

from services.common import names
from services.common.telemetry import Tracing, ended
from services.kvpool.core.pool_host import HostedPool

Apply = Callable[
    [HostedPool[kvpool_pb2.TransactResponse], kvpool_pb2.TransactRequest],
    kvpool_pb2.TransactResponse,
]


def traced(apply: Apply, tracing: Tracing) -> Apply:
    """Wraps the application of a transaction in spans; without tracing it is `apply` itself.

    The transaction is a child of the engine step that sent it, an admission one of the request it
    is for. A message without a trace context leaves no span.
    """
    if not tracing.enabled:
        return apply

    def apply_traced(
        hosted: HostedPool[kvpool_pb2.TransactResponse], request: kvpool_pb2.TransactRequest
    ) -> kvpool_pb2.TransactResponse:
        started = time.time_ns()
        span = tracing.child(names.SPAN_POOL_TRANSACT, request.traceparent, kind=SpanKind.SERVER)
        with ended(span):
            answer = apply(hosted, request)
            _describe_transaction(span, request, answer)
        _record_admissions(tracing, request, answer, started)
        return answer

    return apply_traced


def _describe_transaction(
    span: Span, request: kvpool_pb2.TransactRequest, answer: kvpool_pb2.TransactResponse
) -> None:
    if not span.is_recording():
        return
    span.set_attribute(names.ATTR_GENERATION, answer.generation)
    span.set_attribute(names.ATTR_NUM_OPERATIONS, len(request.operations))
    span.set_attribute(names.ATTR_NUM_FREE_BLOCKS, answer.num_free_blocks)
    if answer.HasField("stop"):
        span.set_attribute(names.ATTR_STOP_REASON, _reason(answer.stop))


def _record_admissions(
    tracing: Tracing,
    request: kvpool_pb2.TransactRequest,
    answer: kvpool_pb2.TransactResponse,
    started_unix_nanos: int,
) -> None:
    """A span for each sampled admission that was tried: those done, and the one that stopped."""
    for index, result in enumerate(answer.results):
        if result.WhichOneof("result") != "admit":
            continue
        done = result.admit.groups[0].num_blocks
        stopped = answer.HasField("stop") and answer.stop.operation_index == index
        tried = request.operations[index].admit.admissions[: len(done) + stopped]
        for item, admission in enumerate(tried):
            if not admission.traceparent:
                continue
            span = tracing.child(
                names.SPAN_POOL_ADMIT, admission.traceparent, start_unix_nanos=started_unix_nanos
            )
            if item < len(done):
                blocks = sum(group.num_blocks[item] for group in result.admit.groups)
                span.set_attribute(names.ATTR_NUM_CACHED_TOKENS, admission.num_hit_tokens)
                span.set_attribute(names.ATTR_NUM_BLOCKS, blocks)
            else:
                span.set_attribute(names.ATTR_STOP_REASON, _reason(answer.stop))
            span.end()


def _reason(stop: kvpool_pb2.Stop) -> str:
    name = kvpool_pb2.StopReason.Name(stop.reason)
    return name.removeprefix("STOP_REASON_").lower()
