import errno
import socket
from contextlib import suppress
from pathlib import Path


def remove_abandoned(path: Path) -> None:
    """Removes the socket of an ended process, so that the path can be bound again. A socket with a
    listening process stays, and so does any file that is not a socket.
    """
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # so that connect fails at once if the queue is full
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                with suppress(FileNotFoundError):
                    path.unlink()
