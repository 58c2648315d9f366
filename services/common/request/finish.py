"""The rules by which a request ends after an output token. The scheduler ends requests by these
rules. The gateway applies them if a scheduler was lost before it sent the finish reason.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from services.common.request.sampling import SamplingParams


class FinishReason(enum.Enum):
    """Why a request ended. OpenAI's API and vLLM have some of these reasons, by the same names."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    NAN_IN_LOGITS = "nan_in_logits"
    """The model's logits contained NaN, so no token could be sampled."""
    REPETITION = "repetition"
    """The output repeated a pattern, as defined by the parameter `repetition_detection`."""
    STEP_FAILED = "step_failed"
    """The workers failed in every step with this request, even in steps without other requests."""
    KV_LOAD_FAILED = "kv_load_failed"
    """Keys and values of the request could not be loaded from external storage, and the scheduler's
    `kv_load_failure_policy` does not permit computing them instead.
    """
    ERROR = "error"
    """An error of this request alone. A message describes it."""
    GRAMMAR_ERROR = "grammar_error"
    """The output's grammar cannot be compiled or became too complex. A message explains why."""
    NO_CONFORMING_TOKEN = "no_conforming_token"
    """No token conforms to the grammar and is permitted by the other parameters."""
    QUEUE_TIMEOUT = "queue_timeout"
    """The request was not scheduled within its maximum waiting time."""


CLIENT_ERRORS = frozenset({FinishReason.GRAMMAR_ERROR, FinishReason.NO_CONFORMING_TOKEN})
"""Finish reasons with a message that names the invalid field, `structured_outputs`."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ends. `stop_token_id` is the client's stop token that ends it, if any."""

    reason: FinishReason
    stop_token_id: int | None = None


def ending_token_ids(sampling: SamplingParams) -> frozenset[int]:
    """Tokens that end a sequence: the EOS tokens and the client's stop tokens. Requests with equal
    ending tokens share one set object, because each step looks up each request's new tokens in the
    request's set. With a set object for each of a thousand requests, most look-ups would miss the
    processor's caches.
    """
    return _token_set((*sampling.eos_token_ids, *sampling.stop_token_ids))


@lru_cache(maxsize=256)
def _token_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(token_ids)


def append_until_end(
    token_ids: list[int],
    new_token_ids: Sequence[int],
    num_prompt_tokens: int,
    max_num_tokens: int,
    ending: frozenset[int],
    sampling: SamplingParams,
) -> Finish | None:
    """Appends new tokens to a sequence (prompt and output), up to the first token that ends the
    sequence. Returns how the sequence ends, or None if it continues. `ending` is
    `ending_token_ids(sampling)`. The checks are in vLLM's order: EOS, stop tokens, length,
    repetition. Before `min_tokens` output tokens, only the length limit ends a sequence.
    """
    repetition = sampling.repetition_detection
    for token_id in new_token_ids:
        token_ids.append(token_id)
        if token_id in ending and len(token_ids) - num_prompt_tokens >= sampling.min_tokens:
            is_eos = token_id in sampling.eos_token_ids
            return Finish(FinishReason.STOP, None if is_eos else token_id)
        if len(token_ids) >= max_num_tokens:
            return Finish(FinishReason.LENGTH)
        if (
            repetition is not None
            and len(token_ids) - num_prompt_tokens >= sampling.min_tokens
            and repetition.found_at_end(token_ids, num_prompt_tokens)
        ):
            return Finish(FinishReason.REPETITION)
    return None
