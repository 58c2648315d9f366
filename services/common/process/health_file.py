"""A file that says whether a service is ready, for probes that cost next to nothing.

Its one line is written by the event loop, so that its age shows a loop that stands still:

    STATE PID BEAT RAN WAITED

STATE is ready, live or not-live: a live service that is not ready is loading or draining, or what
it needs is away. BEAT is the machine's uptime in whole seconds (/proc/uptime), which no change of
the clock moves. RAN and WAITED are how long the main thread of the process PID had run and waited
for a processor by then, in nanoseconds (/proc/PID/schedstat): a reader tells a process that hangs
from one that is starved. `deploy/docker/probe.sh` is such a reader.
"""

import asyncio
import logging
import os
from pathlib import Path

from services.common.errors import Unavailable

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
_UPTIME, _SCHEDSTAT = Path("/proc/uptime"), Path(f"/proc/{os.getpid()}/schedstat")


class HealthFile:
    """Keeps the file up to date while `run` runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = path.with_name(f"{path.name}.next")
        self._is_live, self._is_ready = True, False
        self._failure = ""

    def set_live(self, live: bool) -> None:
        """Notes and writes whether the service can go on."""
        self._is_live = live
        self._try_to_write()

    def set_ready(self, ready: bool) -> None:
        """Notes and writes whether requests can be served now."""
        self._is_ready = ready
        self._try_to_write()

    def write(self) -> None:
        """Replaces the file in one step. Raises Unavailable."""
        state = "not-live"
        if self._is_live:
            state = "ready" if self._is_ready else "live"
        beat, (ran, waited) = _uptime_seconds(), _main_thread_nanos()
        try:
            self._next.write_text(f"{state} {os.getpid()} {beat} {ran} {waited}\n")
            self._next.replace(self._path)
        except OSError as error:
            raise Unavailable(f"cannot write {self._path}: {error.strerror}") from error

    async def run(self) -> None:
        """Writes the file every `BEAT_SECONDS` until cancelled."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._try_to_write()

    def _try_to_write(self) -> None:
        """Logs a failure, such as a full disk, when it is another than the one before."""
        failure = ""
        try:
            self.write()
        except Unavailable as error:
            failure = error.message
            if failure != self._failure:
                logger.warning("%s: probes take this service for one that hangs", failure)
        self._failure = failure


def _uptime_seconds() -> int:
    return int(_UPTIME.read_text().partition(".")[0])


def _main_thread_nanos() -> tuple[int, int]:
    """How long the main thread has run, and waited for a processor; 0 where that is not counted."""
    try:
        ran, waited, _ = _SCHEDSTAT.read_text().split()
    except OSError:
        return 0, 0
    return int(ran), int(waited)
