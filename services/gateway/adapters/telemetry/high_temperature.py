"""Logs a warning about requests whose temperature makes answers almost random."""

import logging
from functools import cache

from services.common.request.sampling import SamplingParams

logger = logging.getLogger(__name__)

_HIGH_TEMPERATURE = 2.0
"""The highest temperature that OpenAI's API accepts."""


def noted(sampling: SamplingParams) -> SamplingParams:
    """Returns the parameters unchanged. The first high temperature in this process is logged."""
    if sampling.temperature > _HIGH_TEMPERATURE:
        warn_once()
    return sampling


@cache
def warn_once() -> None:
    logger.warning(
        "a request has a temperature above %g, which makes answers almost random; further such "
        "requests are not logged",
        _HIGH_TEMPERATURE,
    )
