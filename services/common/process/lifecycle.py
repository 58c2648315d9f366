"""The lifecycle of a service process: read settings, serve until SIGTERM, drain, exit 0.

The `__main__.py` of every service has this structure:

    import gc
    import signal

    if __name__ == "__main__":
        gc.disable()  # until run_service has frozen the imported objects
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the event loop handles it

    ...  # imports

    def main() -> None:
        run_service(SERVICE, ThingSettings, serve)

    async def serve(settings: ThingSettings, stop: asyncio.Event) -> None:
        with service_tracing(SERVICE, settings) as tracing:
            ...  # build the parts, listen on settings.address, wait for stop, drain

Imports create hundreds of thousands of objects and hardly any garbage. Repeated garbage collections
of this growing heap would take a fifth of the processor time of a process's startup. Ctrl-C during
the imports ends the process at once, without a traceback.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import uvloop

from services.common.errors import StepwellError
from services.common.process.logs import configure_logs
from services.common.process.service_settings import ServiceSettings
from services.common.process.settings import SettingError, exit_with, load_settings
from services.common.process.standard_streams import complain, drop_unwritten

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=ServiceSettings)


def run_service(
    service: str,
    settings_class: type[S],
    serve: Callable[[S, asyncio.Event], Awaitable[None]],
    prepare: Callable[[S], None] = lambda _: None,
) -> NoReturn:
    """Runs a service until it ends, then ends the process.

    Reads the settings and configures logs. Calls `prepare(settings)` before there is an event loop,
    and then awaits `serve(settings, stop)`. SIGTERM and SIGINT set `stop`. `serve` then drains and
    returns, and the process exits with status 0. `serve` may clear `stop` and continue to work
    after the drain. Another signal sets `stop` again. A StepwellError of `prepare` or `serve` ends
    the process with the error's sentence and exit status 1, a SettingError with status 2. After
    `serve` the interpreter is not finalized, since finalization takes seconds with large libraries.
    """
    settings = load_settings(settings_class, service)
    configure_logs(service, settings.log_level, settings.log_format)

    async def main() -> None:
        # Garbage collections must not visit the imported objects, which are never freed. A visit
        # takes tens of milliseconds, during which no step is planned.
        gc.freeze()
        gc.enable()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_on_unhandled_error)
        signals: list[int] = []
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, _request_stop, stop, signum, signals)
        await serve(settings, stop)

    failure: StepwellError | SettingError | None = None
    try:
        prepare(settings)
        uvloop.run(main())
    except* (StepwellError, SettingError) as group:
        failure = _first(group)
    if failure is not None:  # an error raised inside except* would be wrapped in a group
        status = 2 if isinstance(failure, SettingError) else 1
        exit_with(f"stepwell {service}: {failure}", status)
    _end(0)


def end_at_once(sentence: str) -> NoReturn:
    """Ends the process with status 1 and a sentence on standard error, even if threads block."""
    complain(sentence)
    _end(1)


def _end(status: int) -> NoReturn:
    logging.shutdown()
    drop_unwritten(sys.stdout, sys.stderr)
    os._exit(status)


def _on_unhandled_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error that no task awaits. A failed look-up of a host name is logged at level debug
    only: if a connection attempt is cancelled, uvloop does not cancel its look-up, and the caller
    has already received another error.
    """
    future = context.get("future")
    is_task = isinstance(future, asyncio.Task)
    if isinstance(context.get("exception"), socket.gaierror) and future is not None and not is_task:
        logger.debug(
            "the look-up of a host name failed after its call had ended: %s", context["exception"]
        )
    else:
        loop.default_exception_handler(context)


def _request_stop(stop: asyncio.Event, signum: int, earlier: list[int]) -> None:
    what = "already stopping" if earlier else "stopping"
    earlier.append(signum)
    logger.info("%s: %s", signal.Signals(signum).name, what)
    stop.set()


def _first(group: BaseExceptionGroup[StepwellError | SettingError]) -> StepwellError | SettingError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
