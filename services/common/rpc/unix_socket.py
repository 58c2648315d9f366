"""Paths of Unix sockets that processes listen at."""

import errno
import socket
from contextlib import suppress
from pathlib import Path


def remove_abandoned(path: Path) -> None:
    """Removes the socket of a process that has ended, so that another one can be bound there. What
    is there otherwise stays: a socket that a process listens at, a file of another kind.
    """
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # where no connection is accepted and the queue is full
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                with suppress(FileNotFoundError):
                    path.unlink()
