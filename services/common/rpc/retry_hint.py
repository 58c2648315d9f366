import random

from services.common.errors import StepwellError

JITTER = 0.25
"""Limit on the random addition to a retry hint, as a fraction of the hint. The addition keeps
clients that were rejected together from returning together.
"""


def retry_hint_seconds(error: StepwellError) -> float | None:
    """Seconds after which the client should retry. They are never less than the error's own value.
    None if the error has no retry time or a retry does not help.
    """
    if error.retry_after_seconds is None or error.may_retry is False:
        return None
    return error.retry_after_seconds * random.uniform(1, 1 + JITTER)
