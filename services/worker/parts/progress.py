"""Logs the progress of a worker's startup."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 10
_QUIET_SECONDS = 2.0


def progress_logger(
    what: str, checkpoint_reached: Callable[[], None]
) -> Callable[[int, int], None]:
    """Returns a function to call with the number of parts done and the total number of parts. The
    function logs `what` and the percentage done after each tenth of the parts, at most once in
    _QUIET_SECONDS. Every call also calls `checkpoint_reached`.
    """
    logged = time.monotonic()

    def log_progress(done: int, total: int) -> None:
        nonlocal logged
        checkpoint_reached()
        is_tenth = done * _PROGRESS_STEPS // total > (done - 1) * _PROGRESS_STEPS // total
        if is_tenth and time.monotonic() >= logged + _QUIET_SECONDS:
            logged = time.monotonic()
            logger.info("%s: %d%%", what, 100 * done // total)

    return log_progress
