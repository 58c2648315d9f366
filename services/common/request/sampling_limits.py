"""Limits a client's sampling parameters. Errors use the parameters' names in the HTTP API."""

from collections.abc import Sequence

from services.common.errors import InvalidArgument
from services.common.request.sampling import SamplingParams

MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARACTERS = 16_384
MAX_BAD_WORDS_TOKENS = 32_768
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096

_CLIENT_NAMES = {"logit_bias_token_ids": "logit_bias", "logit_bias_values": "logit_bias"}
"""The HTTP API's names of parameters that have other names in the protos."""


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidArgument, which names the first parameter that is out of range."""
    _check_sizes(sampling)
    try:
        sampling.validate(vocab_size)
    except InvalidArgument as error:
        name = _CLIENT_NAMES.get(error.field or "", error.field)
        message = error.message.replace(error.field or "", name or "", 1)
        raise InvalidArgument(message, field=name) from error


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument if a token id is outside a vocabulary of `vocab_size` tokens."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidArgument(
            f"{name}: {wrong} is not a token id; token ids are from 0 to {vocab_size - 1}",
            field=name,
        )


def check_bad_words(sizes: Sequence[int]) -> None:
    """Raises InvalidArgument for too many token sequences, or too many tokens in total."""
    for size, most in ((len(sizes), 2 * MAX_BAD_WORDS), (sum(sizes), MAX_BAD_WORDS_TOKENS)):
        if size > most:
            raise InvalidArgument(
                f"bad_words has {size} entries; at most {most} are allowed", field="bad_words"
            )


def _check_sizes(sampling: SamplingParams) -> None:
    check_bad_words([len(word) for word in sampling.bad_words])
    for name, size, most in (
        ("logit_bias", len(sampling.logit_bias_token_ids), MAX_LOGIT_BIASES),
        ("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS),
        ("allowed_token_ids", len(sampling.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS),
    ):
        if size > most:
            raise InvalidArgument(
                f"{name} has {size} entries; at most {most} are allowed", field=name
            )
    for name, count in (
        ("logprobs", sampling.logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidArgument(
                f"{name} must be from 0 to {MAX_LOGPROBS}, not {count}", field=name
            )
