"""Logs the progress of a download."""

import logging
import threading
import time
from pathlib import Path
from types import TracebackType

_log = logging.getLogger(__name__)
_INTERVAL_SECONDS = 10.0
_BLOCK = 512
"""The unit of st_blocks in bytes."""


class Progress:
    """Within its context, logs every ten seconds how much of `total` bytes a folder contains. The
    size is measured on disk, because parts of a file may be written in any order.
    """

    def __init__(self, folder: Path, total: int) -> None:
        self._folder = folder
        self._total = total
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        before, then = self._written(), time.monotonic()
        while not self._stopped.wait(_INTERVAL_SECONDS):
            written, now = self._written(), time.monotonic()
            rate = max(0, written - before) / (now - then)
            before, then = written, now
            of_total = f" of {amount(self._total)}" if self._total else ""
            _log.info("%s%s, %s a second", amount(written), of_total, amount(rate))

    def _written(self) -> int:
        num_bytes = 0
        for path in self._folder.rglob("*"):
            try:
                num_bytes += path.stat().st_blocks * _BLOCK
            except OSError:  # the library has renamed the file
                continue
        return min(num_bytes, self._total) if self._total else num_bytes


def amount(num_bytes: float) -> str:
    """Formats a number of bytes, such as 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
