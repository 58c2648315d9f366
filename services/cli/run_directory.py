"""A private directory for the sockets of one run."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# sockaddr_un holds 108 bytes with its final zero; the longest name in the directory is this.
_LONGEST_PATH_BYTES = 107
_LONGEST_NAME = "scheduler.sock"


@contextmanager
def run_directory() -> Iterator[Path]:
    """A new directory that only this user can enter, removed at the end.

    It lies where temporary files belong, or in /tmp where that path would be too long for a
    socket's address.
    """
    path = Path(tempfile.mkdtemp(prefix="stepwell-"))
    if len(os.fsencode(path / _LONGEST_NAME)) > _LONGEST_PATH_BYTES:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix="stepwell-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
