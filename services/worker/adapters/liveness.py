"""Liveness for health checks: the worker is not live while a step takes longer than it may."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from services.worker.adapters.compute import ComputeThread

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 0.25


async def follow_liveness(
    compute: ComputeThread,
    set_live: Callable[[bool], Awaitable[None]],
    period_seconds: float = PERIOD_SECONDS,
) -> None:
    """Checks whether a step is overdue, every `period_seconds`, until cancelled. Calls
    `set_live` with each change.

    A step counts as hanging if two checks in a row find it overdue: after this process was stopped,
    a step that is nearly done gets a period to end.
    """
    before, live = None, True
    while True:
        await asyncio.sleep(period_seconds)
        overdue = compute.overdue
        hangs = overdue is not None and overdue is before
        before = overdue
        if hangs is not live:
            continue
        live = not hangs
        await set_live(live)
        if overdue is not None:
            logger.error(
                "a step has computed for %.1f s, and was to be done within %.1f s: not live",
                time.monotonic() - overdue.began,
                overdue.allowed_seconds,
            )
        else:
            logger.warning("the step that took too long is done: live again")
