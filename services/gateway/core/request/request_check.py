"""Checks clients' requests before their sequences are queued."""

import re
from collections.abc import Sequence

from services.common.errors import InvalidArgument, OutOfRange, StepwellError
from services.common.request.pooling import PoolingTask
from services.common.request.sampling import MAX_INT32, SamplingParams
from services.common.request.sampling_limits import check_sampling, check_token_ids
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import ClientRequest, Prompt

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_CACHE_SALT_BYTES = 256
MAX_SESSION_ID_BYTES = 256
CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
OTHER_RUNNER = "OTHER_RUNNER"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def is_request_id(name: str) -> bool:
    """Whether a text is valid as a request id. Request ids appear in logs, traces and answers."""
    return _REQUEST_ID.fullmatch(name) is not None


def check_request_id(name: str) -> None:
    """Raises InvalidArgument if the request id is not valid."""
    if not is_request_id(name):
        raise InvalidArgument(
            "request_id must be 1 to 128 printable ASCII characters, without spaces",
            field="request_id",
        )


def check_request(request: ClientRequest, limits: ModelLimits) -> None:
    """Raises InvalidArgument with the name of the invalid field if a request is invalid. Does not
    check the prompts.
    """
    if request.n < 1:
        raise InvalidArgument(f"n must be at least 1, not {request.n}", field="n")
    if request.num_candidates < request.n:
        raise InvalidArgument(
            f"best_of is {request.best_of}, but n={request.n} answers are to be returned",
            field="best_of",
        )
    if not request.prompts:
        raise InvalidArgument("prompt must not be empty", field="prompt")
    _check_runner(request, limits)
    check_sampling(request.sampling, limits.vocab_size)
    _check_stop(request.stop)
    if len(request.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InvalidArgument(
            f"cache_salt may have at most {MAX_CACHE_SALT_BYTES} bytes", field="cache_salt"
        )
    if "\0" in request.cache_salt:
        raise InvalidArgument("cache_salt must not contain the character NUL", field="cache_salt")
    if len(request.session_id.encode()) > MAX_SESSION_ID_BYTES:
        raise InvalidArgument(
            f"session_id may have at most {MAX_SESSION_ID_BYTES} bytes", field="session_id"
        )
    if request.program is not None:
        request.program.check()
    _check_priority(request.priority, limits)


def check_prompt(prompt: Prompt, sampling: SamplingParams, limits: ModelLimits) -> None:
    """Raises InvalidArgument or OutOfRange if a prompt cannot be served. As in vLLM, `max_tokens`
    may be more than what fits after the prompt, but not more than the context.
    """
    length = len(prompt.token_ids)
    if length == 0:
        raise InvalidArgument("prompt must not be empty: the prompt has no tokens", field="prompt")
    if prompt.embeds is not None:
        prompt.embeds.check(limits.hidden_size)
        if sampling.prompt_logprobs is not None:
            raise InvalidArgument(
                "prompt_logprobs: an embedded prompt has no tokens", field="prompt_logprobs"
            )
    if length > limits.max_prompt_tokens:
        raise prompt_too_long(f"{length} tokens", limits)
    if prompt.embeds is None:
        check_token_ids("prompt", prompt.token_ids, limits.vocab_size)
    if limits.pooler is not None:
        return
    room = limits.capacity - length
    if sampling.max_tokens is not None:
        if sampling.max_tokens > limits.capacity:
            raise answer_too_long(sampling.max_tokens, limits)
        room = min(room, sampling.max_tokens)
    if sampling.min_tokens > room:
        raise InvalidArgument(
            f"min_tokens is {sampling.min_tokens}, but at most {room} can be generated",
            field="min_tokens",
        )


def of_prompt(error: StepwellError, number: int, num_prompts: int) -> StepwellError:
    """Adds the prompt's index to the field and message of an error about a prompt, if the request
    has several prompts. Returns any other error unchanged.
    """
    if error.field != "prompt" or num_prompts == 1:
        return error
    name = f"prompt[{number}]"
    message = re.sub(r"\bprompt\b", name, error.message, count=1)
    return type(error)(message, field=name, reason=error.error_reason)


def prompt_too_long(size: str, limits: ModelLimits) -> OutOfRange:
    """Returns the error for a prompt that is too long. `size` is the prompt's length as text, such
    as "600 tokens".
    """
    sentence = f"{_context_length(limits)} prompt has {size}"
    if limits.pooler is None:
        sentence += ", which leaves no room for an answer"
    return OutOfRange(sentence, field="prompt", reason=CONTEXT_LENGTH_EXCEEDED)


def answer_too_long(max_tokens: int, limits: ModelLimits) -> OutOfRange:
    """Returns the error for a `max_tokens` that leaves no room for a prompt."""
    sentence = f"{_context_length(limits)} max_tokens is {max_tokens}"
    message = f"{sentence}, which leaves no room for a prompt"
    return OutOfRange(message, field="max_tokens", reason=CONTEXT_LENGTH_EXCEEDED)


def _context_length(limits: ModelLimits) -> str:
    """Returns the first words of the message of an error about a length. They are the words of
    OpenAI and vLLM, by which some clients, such as LiteLLM, recognize the error.
    """
    sentence = f"This model's maximum context length is {limits.capacity} tokens"
    if limits.max_request_tokens < limits.max_model_len:
        sentence += ", which is what this server's KV cache holds of one request"
    return sentence + ":"


def _check_runner(request: ClientRequest, limits: ModelLimits) -> None:
    """Raises InvalidArgument if the request is for text and the model computes vectors, or if the
    model's pooler does not support the request.
    """
    pooler = limits.pooler
    if request.pooling is None and pooler is not None:
        kind = "scores" if pooler.task is PoolingTask.CLASSIFY else "embeddings"
        raise InvalidArgument(
            f"this model gives {kind} and generates no text: use /"
            + ("score" if pooler.task is PoolingTask.CLASSIFY else "v1/embeddings"),
            field="model",
            reason=OTHER_RUNNER,
        )
    if request.pooling is not None and pooler is not None:
        pooler.check(request.pooling, max(len(prompt.token_ids) for prompt in request.prompts))


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidArgument(
            f"stop holds {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", field="stop"
        )
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
            raise InvalidArgument(
                f"stop: a string must have 1 to {MAX_STOP_STRING_LENGTH} characters, not "
                f"{len(text)}",
                field="stop",
            )


def _check_priority(priority: int, limits: ModelLimits) -> None:
    if abs(priority) > MAX_INT32:
        raise InvalidArgument("priority must fit in 32 bits", field="priority")
    if priority and not limits.priority_scheduling:
        raise InvalidArgument(
            "priority must be 0: this server runs requests in order of arrival", field="priority"
        )
