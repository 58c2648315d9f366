"""Log files in memory, on a disk that may be full."""

import asyncio
import errno
import os
from collections.abc import Callable

from services.scheduler.adapters.telemetry.step_log import FLUSH_SECONDS
from services.simulation.runtime.network import current_process


class MemoryFile:
    """A file in memory. It belongs to the process that creates it."""

    def __init__(self) -> None:
        self.content = b""
        self.has_failed = False
        """Whether a write failed because the disk was full."""
        self._process = current_process()
        self._process.files.append(self)

    def write(self, content: bytes) -> None:
        if self._process.is_disk_full:
            self.has_failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.content += content

    def flush(self) -> None: ...

    def close(self) -> None: ...


class VirtualWriter:
    """Replaces the step log's WriterThread: writes periodically in virtual time."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(FLUSH_SECONDS, self._run)

    def close(self) -> None:
        self._timer.cancel()
        self._write()

    def _run(self) -> None:
        self._write()
        self._timer = self._loop.call_later(FLUSH_SECONDS, self._run)
