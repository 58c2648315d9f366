"""How long clients are asked to wait before they try again."""

import random

from services.common.errors import StepwellError

JITTER = 0.25
"""Largest random addition to a retry hint, as a part of it, so that clients that were refused
together do not come back together.
"""


def retry_hint_seconds(error: StepwellError) -> float | None:
    """When the client should try again, never before the time that the error names; None where
    there is no such time, or trying again does not help.
    """
    if error.retry_after_seconds is None or error.may_retry is False:
        return None
    return error.retry_after_seconds * random.uniform(1, 1 + JITTER)
