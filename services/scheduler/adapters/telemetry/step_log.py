"""The step log is a file of the scheduler's calls and decisions, with a JSON object in each line.

    {"schema": "stepwell.step_log", "version": 4, "config": {...}, "pool": {...}, ...}
    {"call": "add", "key": 1, "id": "...", "tokens": [...], ...}
    {"call": "schedule", "step": 0, "keys": [1], "num_scheduled_tokens": [64], ...}
    {"call": "update_from_output", "step": 0, "token_ids": [[17]], ...}
    {"call": "end"}

The log contains prompts and answers as tokens, so only the owner of the file may read it.
`services.scheduler.core.step_log.log_entry` describes the entries. `stepwell replay` reads them.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from services.common.errors import InvalidArgument
from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.planning.replica_state import Connect
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.ports import KVPool
from services.scheduler.core.step_log import log_entry
from services.scheduler.core.step_log.recorder import RecordingScheduler

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
MAX_WAITING_BYTES = 64 * 2**20
"""Limit on the number of bytes that wait to be written. The log ends if more would wait."""


class StepLog:
    """A log file that a WriterThread writes. Only one thread may call `write`, which never waits
    for the disk. If the disk fails, or if more than MAX_WAITING_BYTES wait, logs a warning and ends
    the log. The entries up to then can be replayed.
    """

    def __init__(self, file: BinaryIO, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._file = file
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._num_waiting_bytes = 0
        self._has_ended = self._has_failed = False
        self._writer = WriterThread(self._write_waiting)

    def write(self, entry: log_entry.Entry) -> None:
        if self._has_ended:
            return
        line = json.dumps(entry, separators=(",", ":")) + "\n"
        with self._lock:
            if self._num_waiting_bytes + len(line) <= self._max_waiting_bytes:
                self._lines.append(line)
                self._num_waiting_bytes += len(line)
                return
        self._give_up(
            f"the disk is too slow, and {self._max_waiting_bytes} bytes still wait to be written"
        )

    def close(self) -> None:
        """Writes the remaining lines, and a last line that marks the log as complete."""
        self.write({"call": "end"})
        self._writer.close()
        try:
            self._file.close()
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _write_waiting(self) -> None:
        with self._lock:
            lines, self._lines, self._num_waiting_bytes = self._lines, [], 0
        if lines and not self._has_failed:
            try:
                self._file.write("".join(lines).encode())
                self._file.flush()
            except OSError as error:
                self._has_failed = True
                self._give_up(error.strerror or str(error))

    def _give_up(self, why: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            logger.warning("the step log is incomplete, no further step is logged: %s", why)


class WriterThread:
    """Calls a function in a thread: every FLUSH_SECONDS, and a last time in `close`."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._write()
        self._write()


@contextmanager
def scheduler_with_log(
    path: Path | None,
    config: SchedulerConfig,
    pool: KVPool,
    shape: ReplicaShape,
    connect: Connect | None = None,
) -> Iterator[Scheduler]:
    """A context manager that returns a scheduler. If `path` is set, the scheduler's calls are
    logged in this file. Raises InvalidArgument if the file cannot be created.
    """
    if path is None:
        yield Scheduler(config, pool, connect, time.monotonic)
        return
    log = StepLog(create_log_file(path))
    try:
        scheduler = RecordingScheduler(config, pool, log.write, connect, time.monotonic)
        log.write(header(config, shape, time.time_ns(), scheduler.log_version))
        yield scheduler
    finally:
        log.close()


def header(
    config: SchedulerConfig,
    shape: ReplicaShape,
    started_unix_nanos: int,
    version: int = log_entry.VERSION,
) -> log_entry.Entry:
    return {
        "schema": log_entry.SCHEMA,
        "version": version,
        "model_name": shape.description.model_name,
        "started_unix_nanos": started_unix_nanos,
        "fingerprint": config.fingerprint.hex(),
        "config": log_entry.config_entry(config),
        "pool": {
            "num_blocks": config.num_blocks,
            "groups": [log_entry.group_entry(group) for group in shape.groups],
        },
    }


def create_log_file(path: Path) -> BinaryIO:
    """Creates a log file, named by the first of NAME.jsonl, NAME.2.jsonl, NAME.3.jsonl, ... that
    does not exist. Existing files, perhaps from before a crash, are not changed.
    """
    compress = _compressor() if path.suffix == ".zst" else None
    stem, dot, suffix = path.name.partition(".")
    number, candidate = 1, path
    while True:
        try:
            descriptor = os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{stem}.{number}{dot}{suffix}")
        except OSError as error:
            raise InvalidArgument(
                f"--step-log {path}: {error.strerror}", field="step_log"
            ) from error
        else:
            break
    logger.info("writing the step log to %s", candidate)
    file = os.fdopen(descriptor, "wb")
    return compress(file) if compress else file


class _CompressedFile:
    """A file to which each write appends a complete compressed frame with a checksum. All complete
    frames are readable while the file grows, and after the writing process was killed.
    """

    def __init__(self, file: BinaryIO, compress: Callable[[bytes], bytes]) -> None:
        self._file = file
        self._compress = compress

    def write(self, content: bytes) -> int:
        self._file.write(self._compress(content))
        return len(content)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _compressor() -> Callable[[BinaryIO], BinaryIO]:
    try:
        import zstandard  # noqa: PLC0415 - an optional dependency
    except ImportError:
        raise InvalidArgument(
            "--step-log *.zst needs zstandard: pip install 'stepwell[zstd]'", field="step_log"
        ) from None
    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    return lambda file: cast(BinaryIO, _CompressedFile(file, compress))
