"""Sampling parameters as a client gives them, and what is wrong with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.errors import InvalidArgument
from services.common.repetition import RepetitionDetection
from services.common.sampling import SamplingParams

MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARACTERS = 16_384
MAX_BAD_WORDS_TOKENS = 32_768
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096

# Where the contract's name of a parameter is not the client's.
_CLIENT_NAMES = {"logit_bias_token_ids": "logit_bias", "logit_bias_values": "logit_bias"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen and when the engine ends a sequence. None is "not said".

    `top_k` 0 keeps all tokens; empty `allowed_token_ids` allows all; `eos_token_ids` is empty when
    the client ignores end of sequence; `logprobs` counts tokens besides the sampled one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_detection: RepetitionDetection | None = None


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidArgument that names the first parameter out of its range."""
    _check_sizes(sampling)
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InvalidArgument(
            f"max_tokens must be at least 1, not {sampling.max_tokens}", field="max_tokens"
        )
    try:
        _params(sampling).validate(vocab_size)
    except InvalidArgument as error:
        name = _CLIENT_NAMES.get(error.field or "", error.field)
        message = error.message.replace(error.field or "", name or "", 1)
        raise InvalidArgument(message, field=name) from error


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument when an id is not in a vocabulary of this size."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidArgument(
            f"{name}: {wrong} is no token; ids go from 0 to {vocab_size - 1}", field=name
        )


def _params(sampling: Sampling) -> SamplingParams:
    s = sampling
    return SamplingParams(
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        logit_bias_token_ids=tuple(s.logit_bias),
        logit_bias_values=tuple(s.logit_bias.values()),
        allowed_token_ids=s.allowed_token_ids,
        bad_words=s.bad_words,
        seed=s.seed or 0,
        min_tokens=s.min_tokens,
        stop_token_ids=s.stop_token_ids,
        eos_token_ids=s.eos_token_ids,
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
        repetition_detection=s.repetition_detection,
    )


def check_bad_words(sizes: Sequence[int]) -> None:
    """Raises InvalidArgument for too many token sequences of these sizes, or too long ones."""
    for size, most in ((len(sizes), 2 * MAX_BAD_WORDS), (sum(sizes), MAX_BAD_WORDS_TOKENS)):
        if size > most:
            raise InvalidArgument(
                f"bad_words holds {size} entries; at most {most}", field="bad_words"
            )


def _check_sizes(sampling: Sampling) -> None:
    """Bounds what a request may cost before anything is done with it."""
    check_bad_words([len(word) for word in sampling.bad_words])
    for name, size, most in (
        ("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES),
        ("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", len(sampling.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS),
    ):
        if size > most:
            raise InvalidArgument(f"{name} holds {size} entries; at most {most}", field=name)
    for name, count in (
        ("logprobs", sampling.logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidArgument(
                f"{name} must be from 0 to {MAX_LOGPROBS}, not {count}", field=name
            )
