"""Between the core's words and the messages of the scheduler's contract."""

from dataclasses import replace

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common import errors
from services.common.block_hash import pack_token_ids
from services.common.prompt_embeds_messages import prompt_embeds_to_message
from services.common.repetition import RepetitionDetection
from services.common.sampling_messages import repetition_from_message
from services.gateway.core.delta import Finish, FinishReason
from services.gateway.core.inflight import Inflight
from services.gateway.core.logprobs import LogprobRows
from services.gateway.core.no_token import NAN_IN_LOGITS
from services.gateway.core.replica import ReplicaDescription, ReplicaState
from services.gateway.core.request import CONTEXT_LENGTH_EXCEEDED, ModelLimits
from services.gateway.core.sampling import Sampling, check_bad_words

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    common_pb2.FINISH_REASON_REPETITION: FinishReason.REPETITION,
}

_REJECTIONS: dict[int, type[errors.StepwellError]] = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: errors.OutOfRange,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: errors.ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE.value[0]: errors.Unavailable,
}

# Reasons of the scheduler that clients know by another name.
_CLIENT_REASONS = {
    "LONGER_THAN_MODEL": CONTEXT_LENGTH_EXCEEDED,
    "LARGER_THAN_POOL": CONTEXT_LENGTH_EXCEEDED,
}

# Fields of AddRequest that clients know by another name.
_CLIENT_FIELDS = {"prompt_token_ids": "prompt", "output_token_ids": "prompt"}


def to_sampling_proto(sampling: Sampling) -> common_pb2.SamplingParams:
    """Sampling parameters on the wire; what is at its default is left out."""
    s = sampling
    message = common_pb2.SamplingParams(
        logit_bias_token_ids=s.logit_bias.keys(),
        logit_bias_values=s.logit_bias.values(),
        allowed_token_ids=s.allowed_token_ids,
        bad_words=[common_pb2.TokenIds(ids=word) for word in s.bad_words],
        stop_token_ids=s.stop_token_ids,
        eos_token_ids=s.eos_token_ids,
        seed=s.seed,
        max_tokens=s.max_tokens,
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
        repetition_detection=_to_repetition_proto(s.repetition_detection),
    )
    for name in _SCALARS:
        value = getattr(s, name)
        if value != getattr(_DEFAULTS, name):
            setattr(message, name, value)
    return message


def _to_repetition_proto(
    wanted: RepetitionDetection | None,
) -> common_pb2.RepetitionDetection | None:
    if wanted is None:
        return None
    return common_pb2.RepetitionDetection(
        max_pattern_size=wanted.max_pattern_size,
        min_pattern_size=wanted.min_pattern_size,
        min_count=wanted.min_count,
    )


_DEFAULTS = Sampling()
_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


def from_sampling_proto(message: common_pb2.SamplingParams, defaults: Sampling) -> Sampling:
    """A client's sampling parameters; what is left out is as in `defaults`.

    Raises InvalidArgument for what cannot be meant, or would be passed over: unequal logit-bias
    arrays, a token named twice in them, end-of-sequence tokens.
    """
    if len(message.logit_bias_token_ids) != len(message.logit_bias_values):
        raise errors.InvalidArgument(
            "logit_bias_values must be as many as logit_bias_token_ids",
            field="sampling.logit_bias_values",
        )
    if len(set(message.logit_bias_token_ids)) != len(message.logit_bias_token_ids):
        raise errors.InvalidArgument(
            "logit_bias_token_ids names a token twice", field="sampling.logit_bias_token_ids"
        )
    if message.eos_token_ids:
        raise errors.InvalidArgument(
            "eos_token_ids are the model's; use stop_token_ids or ignore_eos",
            field="sampling.eos_token_ids",
        )
    check_bad_words([len(word.ids) for word in message.bad_words])  # before they are copied
    optional = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
    given = {
        name: getattr(message, name)
        for name in (*_SCALARS, *optional)
        if message.HasField(name)  # type: ignore[arg-type]
    }
    return replace(
        defaults,
        logit_bias=dict(zip(message.logit_bias_token_ids, message.logit_bias_values, strict=True)),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        stop_token_ids=tuple(message.stop_token_ids),
        repetition_detection=repetition_from_message(message),
        **given,
    )


def to_add_request(handle: int, inflight: Inflight, now: float) -> scheduler_pb2.AddRequest:
    """A sequence with all that came of it, for a replica to begin or to go on with.

    `now` is on the clock of the request's deadline.
    """
    request = inflight.request
    sampling = to_sampling_proto(request.sampling)
    if not inflight.wants_prompt_logprobs:
        sampling.ClearField("prompt_logprobs")
    return scheduler_pb2.AddRequest(
        handle=handle,
        request_id=request.request_id,
        prompt_token_ids=b""
        if request.prompt_embeds is not None
        else pack_token_ids(request.prompt_token_ids),
        prompt_embeds=prompt_embeds_to_message(request.prompt_embeds),
        output_token_ids=pack_token_ids(inflight.output_token_ids),
        sampling=sampling,
        priority=request.priority,
        arrival_unix_nanos=request.arrival_unix_nanos,
        cache_salt=request.cache_salt,
        traceparent=request.traceparent,
        timeout_millis=_timeout_millis(request.deadline, now),
    )


def _timeout_millis(deadline: float | None, now: float) -> int:
    """How long the client still waits; 0 stands for "it does not say"."""
    if deadline is None:
        return 0
    return min(max(1, round(1000 * (deadline - now))), 2**32 - 1)


def from_logprobs_proto(message: common_pb2.Logprobs) -> LogprobRows:
    """Rows of log-probabilities."""
    return LogprobRows.of(message.width, message.token_ids, message.logprobs, message.ranks)


def to_logprobs_proto(rows: LogprobRows | None) -> common_pb2.Logprobs | None:
    """Rows of log-probabilities on the wire."""
    if rows is None:
        return None
    return common_pb2.Logprobs(
        width=rows.width, token_ids=rows.token_ids, logprobs=rows.logprobs, ranks=rows.ranks
    )


def from_finished(message: scheduler_pb2.Finished) -> Finish | errors.StepwellError:
    """How a sequence ended: well, or with what error."""
    match message.reason:
        case common_pb2.FINISH_REASON_NAN_IN_LOGITS:
            return errors.InternalError(message.message, reason=NAN_IN_LOGITS)
        case common_pb2.FINISH_REASON_STEP_FAILED:
            return errors.InternalError(message.message, reason="STEP_FAILED")
        case common_pb2.FINISH_REASON_QUEUE_TIMEOUT:
            return errors.ResourceExhausted(
                message.message, reason="QUEUE_TIMEOUT", retry_after_seconds=1.0
            )
    reason = _FINISH_REASONS.get(message.reason)
    if reason is None:
        return errors.InternalError(
            message.message or "the engine gave the request up", reason="ENGINE_ERROR"
        )
    stop_token_id = message.stop_token_id if message.HasField("stop_token_id") else None
    return Finish(reason, stop_token_id)


def to_finish_reason(reason: FinishReason | None) -> "common_pb2.FinishReason.ValueType":
    """A finish reason on the wire; UNSPECIFIED while there is none."""
    for number, known in _FINISH_REASONS.items():
        if known is reason:
            return number
    return common_pb2.FINISH_REASON_UNSPECIFIED


def from_rejection(message: scheduler_pb2.Rejection) -> errors.StepwellError:
    """What the scheduler said, with the field in the client's words."""
    kind = _REJECTIONS.get(message.code, errors.InternalError)
    field = message.field.rpartition(".")[2]
    return kind(
        message.message,
        field=_CLIENT_FIELDS.get(field, field) or None,
        reason=_CLIENT_REASONS.get(message.reason, message.reason) or None,
        retry_after_seconds=message.retry_after_millis / 1000 or None,
    )


def description_from_proto(message: scheduler_pb2.SessionOpened) -> ReplicaDescription:
    """What a replica serves, and what a request there may be."""
    return ReplicaDescription(
        model_name=message.model_name,
        limits=ModelLimits(
            max_model_len=message.max_model_len,
            max_request_tokens=message.max_request_tokens,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            priority_scheduling=message.priority_scheduling,
            hidden_size=message.hidden_size,
        ),
        fingerprint=message.fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
    )


def replica_state_from_proto(message: scheduler_pb2.ReplicaState) -> ReplicaState:
    """Whether a replica can run steps."""
    return ReplicaState(message.ready, message.reason, message.draining)
