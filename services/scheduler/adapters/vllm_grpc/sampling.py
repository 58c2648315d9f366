"""Converts the sampling parameters of vllm.grpc.engine. Errors name the unsupported field."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2

from services.common.errors import InvalidArgument
from services.common.request.sampling import SamplingParams
from services.common.request.sampling_limits import check_sampling

PREFIX = "sampling_params."

_HONOURED: dict[str, Callable[[Any], dict[str, Any]]] = {
    **{
        field.name: lambda value, name=field.name: {name: value}  # type: ignore[misc]
        for field in fields(SamplingParams)
        if field.name in vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    },
    "stop_token_ids": lambda ids: {"stop_token_ids": tuple(ids)},
    "logit_bias": lambda biases: {
        "logit_bias_token_ids": tuple(biases),
        "logit_bias_values": tuple(biases.values()),
    },
}
"""Maps each supported field to a function that converts its value to sampling parameters. The value
0 of a field without presence (proto3) means the default, and is not converted.
"""

_ELSEWHERE = frozenset({"n", "ignore_eos", "truncate_prompt_tokens", "stop"})
"""Fields that other functions read."""

_TEXT_ONLY = frozenset(
    {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
)
"""Fields about detokenization, which have no effect, as in vLLM's own server."""

MAX_N = 128
"""Limit on the number of answers to one prompt."""


@dataclass(frozen=True, slots=True)
class VllmSampling:
    """The client's sampling parameters, without defaults that depend on the prompt."""

    params: SamplingParams
    """`seed` and `max_tokens` are None if the client did not set them."""
    n: int
    truncate_prompt_tokens: int | None


def vllm_sampling_from_proto(
    message: vllm_engine_pb2.SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    client_stops: bool,
) -> VllmSampling:
    """Converts the parameters of a message. Raises InvalidArgument for a field that is out of range
    or not supported, such as grammars and fields of later protocol versions. With `client_stops`,
    stop strings are accepted and ignored, because the client applies them.
    """
    given: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name in _HONOURED:
            given |= _HONOURED[field.name](value)
        elif field.name == "stop" and not client_stops:
            raise _refused(
                "stop",
                "needs a tokenizer, which this service does not have unless "
                "--vllm-grpc-client-stops is set",
            )
        elif field.name not in _ELSEWHERE | _TEXT_ONLY:
            raise _refused(field.name, "is not supported by this service")
    params = replace(
        SamplingParams(eos_token_ids=() if message.ignore_eos else eos_token_ids), **given
    )
    n = message.n or 1
    if n > MAX_N:
        raise _refused("n", f"is {n}, but must be at most {MAX_N}")
    try:
        check_sampling(_with_valid_seed(params), vocab_size)
    except InvalidArgument as error:
        raise InvalidArgument(f"{PREFIX}{error.message}", field=f"{PREFIX}{error.field}") from error
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _refused("min_tokens", f"is {params.min_tokens}, but must not be above max_tokens")
    return VllmSampling(params, n, _truncation(message))


def _truncation(message: vllm_engine_pb2.SamplingParams) -> int | None:
    if not message.HasField("truncate_prompt_tokens"):
        return None
    limit: int = message.truncate_prompt_tokens
    if limit < -1 or limit == 0:
        raise _refused("truncate_prompt_tokens", f"is {limit}, but must be -1 or above 0")
    return limit


def _with_valid_seed(params: SamplingParams) -> SamplingParams:
    """Removes the seed before validation, which would reject negative seeds (valid here)."""
    return replace(params, seed=None)


def _refused(name: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{PREFIX}{name} {problem}", field=f"{PREFIX}{name}")
