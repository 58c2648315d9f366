import enum


class FinishReason(enum.Enum):
    """Why a request ended. If OpenAI's API or vLLM has the same reason, its name there is used."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    NAN_IN_LOGITS = "nan_in_logits"
    """The model's logits contained NaN, so no token could be sampled."""
    REPETITION = "repetition"
    """The output repeated a pattern, by the rule of `repetition_detection`."""
    STEP_FAILED = "step_failed"
    """The workers failed in every step with this request, even in steps without other requests."""
    KV_LOAD_FAILED = "kv_load_failed"
    """Keys and values of the request could not be loaded from external storage, and the scheduler's
    `kv_load_failure_policy` does not permit computing them instead.
    """
    ERROR = "error"
    """An error of this request alone. A message describes it."""
    GRAMMAR_ERROR = "grammar_error"
    """The output's grammar cannot be compiled or became too complex. A message says why."""
    NO_CONFORMING_TOKEN = "no_conforming_token"
    """No token conforms to the grammar and is permitted by the other parameters."""
    QUEUE_TIMEOUT = "queue_timeout"
    """The request was not scheduled within its maximum waiting time."""


CLIENT_ERRORS = frozenset({FinishReason.GRAMMAR_ERROR, FinishReason.NO_CONFORMING_TOKEN})
"""Finish reasons with a message that names the invalid field, `structured_outputs`."""
