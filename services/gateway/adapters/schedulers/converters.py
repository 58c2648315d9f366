"""Converts between the core's types and the scheduler's messages."""

from functools import lru_cache
from hashlib import blake2b

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common import errors
from services.common.pool.block_hash import pack_token_ids
from services.common.request.finish import CLIENT_ERRORS, Finish, FinishReason
from services.common.request.messages import (
    adapter_to_proto,
    finish_reason_from_proto,
    pooler_from_proto,
    pooling_to_proto,
    program_to_proto,
    prompt_embeds_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from services.common.request.sampling import SamplingParams
from services.common.request.sampling_limits import check_bad_words
from services.common.request.structured_outputs import FIELD
from services.common.telemetry.time_parts import EXPLANATIONS, OTHER, TimePart
from services.common.telemetry.trace_context import numbered_traceparent
from services.gateway.core.fleet.replica_description import ReplicaDescription, ReplicaState
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request_check import CONTEXT_LENGTH_EXCEEDED
from services.gateway.core.traces.sequence_trace import EngineTimes

_REJECTIONS: dict[int, type[errors.StepwellError]] = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: errors.OutOfRange,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: errors.ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE.value[0]: errors.Unavailable,
}

_CLIENT_REASONS = {
    "LONGER_THAN_MODEL": CONTEXT_LENGTH_EXCEEDED,
    "LARGER_THAN_POOL": CONTEXT_LENGTH_EXCEEDED,
}
"""Maps error reasons of the scheduler to different reasons that clients get instead."""

_CLIENT_FIELDS = {
    "parent_id": "program.parent_id",
    "prompt_token_ids": "prompt",
    "output_token_ids": "prompt",
    "adapter": "model",
}
"""Maps fields of AddRequest to their names in clients' requests, if the names differ."""


def client_sampling_from_proto(
    message: common_pb2.SamplingParams, defaults: SamplingParams
) -> SamplingParams:
    """Converts a client's sampling parameters. Absent fields have the values of `defaults`.

    Raises InvalidArgument if eos_token_ids is set, which only the gateway may set, if there are too
    many bad words, or if the logit-bias arrays have unequal lengths or repeat a token. Other fields
    are checked later.
    """
    if len(message.logit_bias_token_ids) != len(message.logit_bias_values):
        raise errors.InvalidArgument(
            "logit_bias_values must have as many entries as logit_bias_token_ids",
            field="sampling.logit_bias_values",
        )
    if len(set(message.logit_bias_token_ids)) != len(message.logit_bias_token_ids):
        raise errors.InvalidArgument(
            "logit_bias_token_ids names a token twice", field="sampling.logit_bias_token_ids"
        )
    if message.eos_token_ids:
        raise errors.InvalidArgument(
            "eos_token_ids cannot be set, as the model defines them; use stop_token_ids or "
            "ignore_eos",
            field="sampling.eos_token_ids",
        )
    check_bad_words([len(word.ids) for word in message.bad_words])
    return sampling_from_proto(message, defaults)


def inflight_to_proto(handle: int, inflight: Inflight, now: float) -> scheduler_pb2.AddRequest:
    """Converts a sequence with all its output so far, after which the replica continues it. The
    message contains the time left until the request's deadline. `now` is the current time on the
    deadline's clock.
    """
    request = inflight.request
    sampling = sampling_to_proto(request.sampling)
    if not inflight.wants_prompt_logprobs:
        sampling.ClearField("prompt_logprobs")
    return scheduler_pb2.AddRequest(
        handle=handle,
        request_id=request.request_id,
        prompt_token_ids=b""
        if request.prompt_embeds is not None
        else pack_token_ids(request.prompt_token_ids),
        prompt_embeds=prompt_embeds_to_proto(request.prompt_embeds),
        output_token_ids=pack_token_ids(inflight.output_token_ids),
        sampling=sampling,
        priority=request.priority,
        arrival_unix_nanos=request.arrival_unix_nanos,
        cache_salt=request.cache_salt,
        traceparent=numbered_traceparent(request.trace.traceparent, inflight.trace.span_number),
        tracestate=request.trace.tracestate,
        baggage=request.trace.baggage,
        timeout_millis=_timeout_millis(request.deadline, now),
        num_choices=0 if inflight.was_accepted else request.num_choices,
        pooling=pooling_to_proto(request.pooling),
        resumable=request.turn is not None,
        adapter=adapter_to_proto(request.adapter),
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
        program=program_to_proto(request.program),
        tenant=tenant_digest(request.caller.caller_id),
        tenant_weight=request.caller.weight,
        tenant_max_retained_share=request.caller.max_retained_share,
    )


@lru_cache
def tenant_digest(caller_id: str) -> bytes:
    """Returns a digest that identifies a caller to schedulers without revealing its id."""
    return blake2b(caller_id.encode(), digest_size=16).digest() if caller_id else b""


def chunk_to_proto(handle: int, inflight: Inflight, num_tokens: int) -> scheduler_pb2.AddChunk:
    """Converts the next turn of a client's session. The first `num_tokens` tokens of its prompt are
    at the replica already, from earlier turns, so only the tokens after them are sent.
    """
    request = inflight.request
    return scheduler_pb2.AddChunk(
        handle=handle,
        request_id=request.request_id,
        token_ids=pack_token_ids(request.prompt_token_ids[num_tokens:]),
        num_tokens=num_tokens,
        sampling=sampling_to_proto(request.sampling),
        arrival_unix_nanos=request.arrival_unix_nanos,
        traceparent=numbered_traceparent(request.trace.traceparent, inflight.trace.span_number),
        tracestate=request.trace.tracestate,
        baggage=request.trace.baggage,
    )


def _timeout_millis(deadline: float | None, now: float) -> int:
    """Returns the milliseconds to the deadline, at least 1. Returns 0 if there is no deadline."""
    if deadline is None:
        return 0
    return min(max(1, round(1000 * (deadline - now))), 2**32 - 1)


def logprobs_from_proto(message: common_pb2.Logprobs) -> LogprobRows:
    return LogprobRows.of(message.width, message.token_ids, message.logprobs, message.ranks)


def logprobs_to_proto(rows: LogprobRows | None) -> common_pb2.Logprobs | None:
    if rows is None:
        return None
    return common_pb2.Logprobs(
        width=rows.width, token_ids=rows.token_ids, logprobs=rows.logprobs, ranks=rows.ranks
    )


def times_from_proto(message: scheduler_pb2.RequestTimes) -> EngineTimes:
    return EngineTimes(
        queue=message.queue_nanos / 1e9,
        prefill=message.prefill_nanos / 1e9,
        decode=message.decode_nanos / 1e9,
        interrupted=message.interrupted_nanos / 1e9,
        queued_unix_nanos=message.queued_unix_nanos or None,
        parts=tuple(
            TimePart(
                part.name if part.name in EXPLANATIONS else OTHER,
                part.nanos,
                part.waited_for,
                part.step if part.HasField("step") else None,
            )
            for part in message.parts
        ),
    )


def finish_from_proto(message: scheduler_pb2.Finished) -> Finish | errors.StepwellError:
    """Converts a sequence's end to its finish reason, or to the error that ended the sequence."""
    match finish_reason_from_proto(message.reason):
        case FinishReason.NAN_IN_LOGITS | FinishReason.ERROR | FinishReason.STEP_FAILED as reason:
            name = "REQUEST_FAILED" if reason is FinishReason.ERROR else reason.name
            return errors.InternalError(message.message, reason=name, may_retry=False)
        case FinishReason.KV_LOAD_FAILED:
            return errors.InternalError(message.message, reason="KV_LOAD_FAILED")
        case FinishReason() as reason if reason in CLIENT_ERRORS:
            return errors.InvalidArgument(message.message, field=FIELD, reason=reason.name)
        case FinishReason.QUEUE_TIMEOUT:
            return errors.ResourceExhausted(
                message.message, reason="QUEUE_TIMEOUT", retry_after_seconds=1.0
            )
        case None:
            return errors.InternalError(
                message.message or "the engine aborted the request", reason="ENGINE_ERROR"
            )
        case reason:
            stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
            return Finish(reason, stop_token_id)


def turn_end_from_proto(message: scheduler_pb2.Finished) -> Finish:
    """Converts the end of a turn of a client's session. A turn never ends with an error."""
    end = finish_from_proto(message)
    if isinstance(end, errors.StepwellError):
        raise AssertionError(f"the turn of a session ended with an error: {end.message}")
    return end


def is_rejection_known(message: scheduler_pb2.Rejection) -> bool:
    """Whether the message has a code with which schedulers refuse requests."""
    return message.code in _REJECTIONS


def rejection_from_proto(message: scheduler_pb2.Rejection) -> errors.StepwellError:
    """Converts a refusal by a scheduler to an error with the clients' names of field and reason."""
    kind = _REJECTIONS.get(message.code, errors.InternalError)
    field = message.field.rpartition(".")[2]
    return kind(
        message.message,
        field=_CLIENT_FIELDS.get(field, field) or None,
        reason=_CLIENT_REASONS.get(message.reason, message.reason) or None,
        retry_after_seconds=message.retry_after_millis / 1000 or None,
    )


def description_from_proto(message: scheduler_pb2.SessionOpened) -> ReplicaDescription:
    return ReplicaDescription(
        model_name=message.model_name,
        limits=ModelLimits(
            max_model_len=message.max_model_len,
            max_request_tokens=message.max_request_tokens,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            priority_scheduling=message.priority_scheduling,
            hidden_size=message.hidden_size,
            pooler=pooler_from_proto(message.pooler),
        ),
        fingerprint=message.fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        block_size=message.block_size,
        hash_block_size=message.hash_block_size or None,
        cache_node=message.cache_node,
        kvpool_address=message.kvpool_address,
        pool_id=message.pool_id,
        max_num_seqs=message.max_num_seqs,
        retains_contexts=message.retains_contexts,
    )


def replica_state_from_proto(message: scheduler_pb2.ReplicaState) -> ReplicaState:
    return ReplicaState(message.ready, message.reason, message.draining, message.stalled)
