"""Converts the deltas (new tokens, ends) of a Generate call to messages of vllm.grpc.engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import InternalError, InvalidArgument, ResourceExhausted
from services.common.request.finish import CLIENT_ERRORS, FinishReason
from services.common.request.messages import finish_reason_from_proto
from services.common.request.structured_outputs import FIELD
from services.scheduler.adapters.vllm_grpc.requests import Generation

_RETRY_SECONDS = 1.0

_VLLM_WORDS: dict[FinishReason | None, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


@dataclass(slots=True)
class _Answer:
    """The tokens of one answer, and the log-probabilities that were not sent yet."""

    index: int
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    output_logprobs: vllm_engine_pb2.OutputLogProbs | None = None
    """The log-probabilities that were not sent yet. Without streaming, they are sent at the end."""
    input_logprobs: vllm_engine_pb2.InputLogProbs | None = None


class Answers:
    """The answers of one Generate call. If the call streams, each delta of an answer becomes a
    chunk with the new tokens and their log-probabilities. The first chunk of each answer also has
    the log-probabilities of the prompt. Every answer ends with a message that contains all its
    tokens and, if the call does not stream, all log-probabilities.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._answers = [_Answer(request.handle) for request in generation.requests]
        self.num_open = len(self._answers)

    def take(self, deltas: scheduler_pb2.StepDeltas) -> Iterator[vllm_engine_pb2.GenerateResponse]:
        """Converts deltas to messages. Raises StepwellError for a finish reason unknown to vLLM."""
        for admitted in deltas.admitted:
            self._answers[admitted.handle].num_cached_tokens = admitted.num_cached_tokens
        for item in deltas.logprobs:
            self._add_logprobs(self._answers[item.handle], item)
        start = 0
        for handle, count in zip(deltas.handles, deltas.num_tokens, strict=True):
            answer, tokens = self._answers[handle], deltas.token_ids[start : start + count]
            answer.token_ids += tokens
            if self._generation.stream:
                yield self._chunk(answer, tokens)
            start += count
        for finished in deltas.finished:
            self.num_open -= 1
            yield self._complete(self._answers[finished.handle], finished)

    def _chunk(self, answer: _Answer, tokens: Sequence[int]) -> vllm_engine_pb2.GenerateResponse:
        output, answer.output_logprobs = answer.output_logprobs, None
        prompt, answer.input_logprobs = answer.input_logprobs, None
        return vllm_engine_pb2.GenerateResponse(
            chunk=vllm_engine_pb2.GenerateStreamChunk(
                token_ids=tokens,
                prompt_tokens=len(self._generation.prompt_token_ids),
                completion_tokens=len(tokens),
                cached_tokens=answer.num_cached_tokens,
                output_logprobs=output,
                input_logprobs=prompt,
                index=answer.index,
            )
        )

    def _complete(
        self, answer: _Answer, finished: scheduler_pb2.Finished
    ) -> vllm_engine_pb2.GenerateResponse:
        stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
        return vllm_engine_pb2.GenerateResponse(
            complete=vllm_engine_pb2.GenerateComplete(
                output_ids=answer.token_ids,
                finish_reason=_finish_reason(finished),
                prompt_tokens=len(self._generation.prompt_token_ids),
                completion_tokens=len(answer.token_ids),
                cached_tokens=answer.num_cached_tokens,
                output_logprobs=answer.output_logprobs,
                input_logprobs=answer.input_logprobs,
                index=answer.index,
                matched_token_id=stop_token_id,
            )
        )

    def _add_logprobs(self, answer: _Answer, item: scheduler_pb2.RequestLogprobs) -> None:
        if item.HasField("sampled"):
            answer.output_logprobs = answer.output_logprobs or vllm_engine_pb2.OutputLogProbs()
            rows = item.sampled
            answer.output_logprobs.token_ids.extend(rows.token_ids[:: rows.width])
            answer.output_logprobs.token_logprobs.extend(rows.logprobs[:: rows.width])
            answer.output_logprobs.top_logprobs.extend(_top_logprobs(rows))
        if item.HasField("prompt"):
            answer.input_logprobs = answer.input_logprobs or self._first_prompt_row()
            rows = item.prompt
            answer.input_logprobs.token_ids.extend(rows.token_ids[:: rows.width])
            for value in rows.logprobs[:: rows.width]:
                answer.input_logprobs.token_logprobs.add(value=value)
            answer.input_logprobs.top_logprobs.extend(_top_logprobs(rows))

    def _first_prompt_row(self) -> vllm_engine_pb2.InputLogProbs:
        """The log-probability row of the first prompt token, which has no log-probability."""
        tops = [vllm_engine_pb2.TopLogProbs()] if self._generation.num_prompt_logprobs else []
        return vllm_engine_pb2.InputLogProbs(
            token_ids=self._generation.prompt_token_ids[:1],
            token_logprobs=[vllm_engine_pb2.InputTokenLogProb()],
            top_logprobs=tops,
        )


def _top_logprobs(rows: common_pb2.Logprobs) -> Iterator[vllm_engine_pb2.TopLogProbs]:
    """The most probable tokens of each row, best first. Empty if none were requested."""
    if rows.width == 1:
        return
    for start in range(0, len(rows.token_ids), rows.width):
        end = start + rows.width
        yield vllm_engine_pb2.TopLogProbs(
            token_ids=rows.token_ids[start + 1 : end], values=rows.logprobs[start + 1 : end]
        )


def _finish_reason(finished: scheduler_pb2.Finished) -> str:
    """vLLM's name of a finish reason. Raises StepwellError for a reason unknown to vLLM."""
    reason = finish_reason_from_proto(finished.reason)
    if reason in _VLLM_WORDS:
        return _VLLM_WORDS[reason]
    if reason is FinishReason.QUEUE_TIMEOUT:
        raise ResourceExhausted(
            finished.message, reason="QUEUE_TIMEOUT", retry_after_seconds=_RETRY_SECONDS
        )
    if reason is not None and reason in CLIENT_ERRORS:
        raise InvalidArgument(finished.message, field=FIELD, reason=reason.name)
    if reason is FinishReason.ERROR:
        raise InternalError(finished.message, reason="REQUEST_FAILED")
    name = reason.name if reason is not None else "ENGINE_ERROR"
    raise InternalError(finished.message or "the engine ended the request", reason=name)
