"""Converts Generate requests of vllm.grpc.engine to the requests that Stepwell's gateways send."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from smg_grpc_proto.generated import vllm_engine_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import InvalidArgument, OutOfRange, StepwellError
from services.common.pool.block_hash import pack_token_ids
from services.common.request.messages import sampling_to_proto
from services.common.request.seeds import answer_seed
from services.scheduler.adapters.vllm_grpc.sampling import (
    PREFIX,
    VllmSampling,
    vllm_sampling_from_proto,
)

INPUT_FIELD = "tokenized.input_ids"
MAX_REQUEST_ID = 1024
"""Limit on the characters of a request's id, which each answer's request contains."""
_READ = frozenset({"request_id", "tokenized", "sampling_params", "stream", "data_parallel_rank"})


@dataclass(frozen=True, slots=True)
class Generation:
    """The prompt of one Generate call, and one request for each of its answers."""

    request_id: str
    prompt_token_ids: list[int]
    stream: bool
    requests: list[scheduler_pb2.AddRequest]
    num_prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class GenerateConverter:
    """Converts Generate requests for the model that `opened` describes."""

    opened: scheduler_pb2.SessionOpened
    client_stops: bool
    """Whether the client ends answers at stop strings. If not, stop strings are refused."""
    draw_seed: Callable[[], int]

    def convert(
        self,
        message: vllm_engine_pb2.GenerateRequest,
        *,
        traceparent: str = "",
        timeout_seconds: float | None = None,
    ) -> Generation:
        """Converts a call. Raises InvalidArgument for an invalid or unsupported field."""
        for field, _ in message.ListFields():
            if field.name not in _READ:
                raise _refused(field.name, _why_not(field.name))
        if not 0 < len(message.request_id) <= MAX_REQUEST_ID:
            raise _refused("request_id", f"must have from 1 to {MAX_REQUEST_ID} characters")
        if message.data_parallel_rank:
            raise _refused(
                "data_parallel_rank", "must be 0: this service has no other data-parallel ranks"
            )
        sampling = vllm_sampling_from_proto(
            message.sampling_params,
            vocab_size=self.opened.vocab_size,
            eos_token_ids=tuple(self.opened.eos_token_ids),
            client_stops=self.client_stops,
        )
        prompt = self._prompt(message, sampling)
        return Generation(
            request_id=message.request_id,
            prompt_token_ids=prompt,
            stream=message.stream,
            requests=self._requests(
                message.request_id, prompt, sampling, traceparent, timeout_seconds
            ),
            num_prompt_logprobs=sampling.params.prompt_logprobs,
        )

    def _prompt(
        self, message: vllm_engine_pb2.GenerateRequest, sampling: VllmSampling
    ) -> list[int]:
        """The prompt's last `truncate_prompt_tokens` tokens, or all tokens if it is not set. With
        -1, the prompt is truncated only so far that one token can be generated. A prompt that is
        longer than the model's context is refused here, before it is copied for each answer.
        """
        given, limit = message.tokenized.input_ids, sampling.truncate_prompt_tokens
        longest = self.opened.max_request_tokens - 1
        if not given:
            raise _refused(INPUT_FIELD, "is empty")
        if limit is None and len(given) > self.opened.max_model_len:
            raise OutOfRange(
                f"{INPUT_FIELD} has {len(given)} tokens, but this model's maximum context length "
                f"is {self.opened.max_model_len} tokens",
                field=INPUT_FIELD,
                reason="LONGER_THAN_MODEL",
            )
        if limit is not None and limit > longest:
            raise _refused(
                f"{PREFIX}truncate_prompt_tokens",
                f"is {limit}; a prompt has at most {longest} tokens",
            )
        prompt = list(given if limit is None else given[-(longest if limit == -1 else limit) :])
        if (wrong := max(prompt)) >= self.opened.vocab_size:
            raise _refused(
                INPUT_FIELD, f"contains {wrong}, but tokens must be below {self.opened.vocab_size}"
            )
        return prompt

    def _requests(
        self,
        request_id: str,
        prompt: list[int],
        sampling: VllmSampling,
        traceparent: str,
        timeout_seconds: float | None,
    ) -> list[scheduler_pb2.AddRequest]:
        params, drawn = sampling.params, self.draw_seed()
        room = max(1, self.opened.max_request_tokens - len(prompt))
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if params.min_tokens > room:
            raise _refused(
                f"{PREFIX}min_tokens",
                f"is {params.min_tokens}, but at most {room} tokens can be generated after this "
                "prompt",
            )
        packed = pack_token_ids(prompt)
        return [
            scheduler_pb2.AddRequest(
                handle=child,
                request_id=request_id if sampling.n == 1 else f"{request_id}-{child}",
                prompt_token_ids=packed,
                sampling=sampling_to_proto(
                    replace(
                        params,
                        seed=answer_seed(params.seed, drawn, 0, child, sampling.n),
                        max_tokens=max_tokens,
                    )
                ),
                traceparent=traceparent,
                timeout_millis=_millis(timeout_seconds),
            )
            for child in range(sampling.n)
        ]


def with_client_names(error: StepwellError) -> StepwellError:
    """Replaces Stepwell's name of the field in an error by the client's name."""
    if error.field is None:
        return error
    name = error.field
    renamed = INPUT_FIELD if name == "prompt_token_ids" else name.replace("sampling.", PREFIX, 1)
    return type(error)(
        error.message.replace(name, renamed, 1),
        field=renamed,
        reason=error.error_reason,
        retry_after_seconds=error.retry_after_seconds,
    )


def _millis(seconds: float | None) -> int:
    if seconds is None:
        return 0
    return min(max(1, round(1000 * seconds)), 2**32 - 1)


def _why_not(name: str) -> str:
    if name == "text":
        return (
            "needs a tokenizer, which this service does not have: send the field tokenized instead"
        )
    return "is not supported by this service"


def _refused(name: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{name} {problem}", field=name)
