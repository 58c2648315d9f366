"""The health file, which shows a service's readiness to probes at almost no cost.

The file has one line. The event loop writes it, so the file's age reveals a blocked loop:

    STATE PID BEAT RAN WAITED

STATE is ready, live or not-live. A service that is live but not ready is loading or draining, or a
service that it depends on is unavailable. BEAT is the machine's uptime in whole seconds, as in
/proc/uptime, which clock changes do not affect. RAN and WAITED are the times for which the main
thread of process PID has run and has waited for a processor, in nanoseconds (/proc/PID/schedstat).
They let a probe such as `deploy/docker/probe.sh` distinguish a hung process from a starved one.
"""

import asyncio
import logging
import os
import time
from pathlib import Path

from services.common.errors import Unavailable

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
_SCHEDSTAT = f"/proc/{os.getpid()}/schedstat"


class HealthFile:
    """Writes the health file at each change and, while `run` runs, every `BEAT_SECONDS`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = path.with_name(f"{path.name}.next")
        self._is_live, self._is_ready = True, False
        self._failure = ""

    def set_live(self, live: bool) -> None:
        """Sets whether the process is live, that is, not hung, and writes the file."""
        self._is_live = live
        self._try_to_write()

    def set_ready(self, ready: bool) -> None:
        """Sets whether requests can be served now, and writes the file."""
        self._is_ready = ready
        self._try_to_write()

    def write(self) -> None:
        """Replaces the file atomically. Raises Unavailable."""
        state = "not-live"
        if self._is_live:
            state = "ready" if self._is_ready else "live"
        beat, (ran, waited) = int(time.clock_gettime(time.CLOCK_BOOTTIME)), _main_thread_nanos()
        try:
            with open(self._next, "wb", buffering=0) as file:  # noqa: PTH123 - half the time
                file.write(f"{state} {os.getpid()} {beat} {ran} {waited}\n".encode())
            os.replace(self._next, self._path)  # noqa: PTH105
        except OSError as error:
            raise Unavailable(f"cannot write {self._path}: {error.strerror}") from error

    async def run(self) -> None:
        """Writes the file every `BEAT_SECONDS` until cancelled."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._try_to_write()

    def _try_to_write(self) -> None:
        failure = ""
        try:
            self.write()
        except Unavailable as error:
            failure = error.message
            if failure != self._failure:
                logger.warning(
                    "%s: until the file can be written, probes report that this service hangs",
                    failure,
                )
        self._failure = failure


def _main_thread_nanos() -> tuple[int, int]:
    """Nanoseconds for which the main thread ran, and for which it waited for a processor. Both are
    0 if the kernel does not count them.
    """
    try:
        with open(_SCHEDSTAT, "rb", buffering=0) as file:  # noqa: PTH123 - half the time
            ran, waited, _ = file.read().split()
    except OSError:
        return 0, 0
    return int(ran), int(waited)
