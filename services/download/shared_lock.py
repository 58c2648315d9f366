"""A lock between processes, also of several machines, that share a volume."""

import errno
import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.5
_LOG_SECONDS = 30.0
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Locks the file, and waits while another process has it locked. The lock ends with its
    process. File systems without locks are used without them.
    """
    with file.open("a") as opened:
        reported = -_LOG_SECONDS
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - reported >= _LOG_SECONDS:
                    reported = time.monotonic()
                    _log.info("waiting while another process downloads into %s", file.parent)
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                _log.warning("the volume has no locks, so processes may download files twice")
                break
        yield
