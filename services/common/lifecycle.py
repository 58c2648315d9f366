"""The life of a service process: start, serve until told to stop, drain, exit 0."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from services.common.errors import StepwellError
from services.common.settings import exit_with

logger = logging.getLogger(__name__)


def run_service(service: str, serve: Callable[[asyncio.Event], Awaitable[None]]) -> NoReturn:
    """Runs `serve(stop)` to its end; SIGTERM and SIGINT set `stop`, for it to drain and return.

    A StepwellError that `serve` raises, at start or later, ends the process with its one sentence
    and exit status 1. Once all is drained the process ends at once: taking an interpreter with
    large libraries apart takes seconds in which an impatient supervisor would kill it.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, _request_stop, stop, signum)
        await serve(stop)

    failure: StepwellError | None = None
    try:
        uvloop.run(main())
    except* StepwellError as group:
        failure = _first(group)
    if failure is not None:  # what is raised inside except* would come out in a group of its own
        exit_with(f"stepwell {service}: {failure}", status=1)
    _end(0)


def end_at_once(sentence: str, status: int = 1) -> NoReturn:
    """Ends the process with one sentence on standard error, whatever its threads wait for."""
    print(sentence, file=sys.stderr)
    _end(status)


def _end(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _request_stop(stop: asyncio.Event, signum: int) -> None:
    logger.info("%s: draining", signal.Signals(signum).name)
    stop.set()


def _first(group: BaseExceptionGroup[StepwellError]) -> StepwellError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
