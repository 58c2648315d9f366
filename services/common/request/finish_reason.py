"""Why a request ended."""

import enum


class FinishReason(enum.Enum):
    """Why a request ended; values are OpenAI's and vLLM's words where they have one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    NAN_IN_LOGITS = "nan_in_logits"
    """The model's logits held NaN: no token could be sampled."""
    REPETITION = "repetition"
    """The output repeated one pattern, as `repetition_detection` describes."""
    STEP_FAILED = "step_failed"
    """The workers were lost in every step of the request, also in those with no other request."""
    KV_LOAD_FAILED = "kv_load_failed"
    """Keys and values of the request could not be loaded from where they are stored, and it is not
    to compute them instead.
    """
    ERROR = "error"
    """Something of this request alone went wrong, which a message says."""
    GRAMMAR_ERROR = "grammar_error"
    """The grammar that the output must follow is too complex to go on with, or cannot be compiled,
    as a message says.
    """
    NO_CONFORMING_TOKEN = "no_conforming_token"
    """No token is left that conforms to the grammar and that the other parameters allow."""
    QUEUE_TIMEOUT = "queue_timeout"
    """The request was not scheduled within the time that it may wait."""


CLIENT_ERRORS = frozenset({FinishReason.GRAMMAR_ERROR, FinishReason.NO_CONFORMING_TOKEN})
"""Ends by an error that is the request's own. A message names the field at fault, which is
`structured_outputs`.
"""
