"""A private directory for the sockets of one run of `stepwell up`."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.cli.errors import CommandError
from services.common.rpc.local_stream import streams_path

_LONGEST_PATH_BYTES = 107
"""The longest path of a Unix socket. sockaddr_un has 108 bytes, including a final zero byte."""
_LONGEST_NAME = streams_path("scheduler-63.sock")
_PRIVATE = 0o700


def ensure_directory(path: Path) -> None:
    """Creates a run's directory again if it was removed. It must not belong to another user."""
    try:
        path.mkdir(mode=_PRIVATE)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise CommandError(
                f"{path} was replaced by a directory or file of another user"
            ) from None
    except OSError as error:
        raise CommandError(f"cannot make {path} again: {error.strerror}") from error


@contextmanager
def run_directory() -> Iterator[Path]:
    """Yields a new directory that only this user can enter, and removes it when the `with` block
    ends. Its parent is the directory for temporary files, or /tmp if sockets' paths were too long.
    """
    path = Path(tempfile.mkdtemp(prefix="stepwell-"))
    if len(os.fsencode(path / _LONGEST_NAME)) > _LONGEST_PATH_BYTES:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix="stepwell-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
