"""A Unix socket to which only the user of this process can connect."""

import socket
from pathlib import Path

from services.common.errors import Unavailable
from services.common.rpc.unix_socket import remove_abandoned

UNIX = "unix:"
_OWNER_ONLY = 0o600
_BACKLOG = 128


def bind_unix_socket(address: str) -> socket.socket:
    """Binds a socket at unix:PATH and listens. Replaces a socket file that no process uses any
    more. Raises Unavailable if the address is in use or cannot be bound.
    """
    path = Path(address.removeprefix(UNIX))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_abandoned(path)
        listener.bind(str(path))
        path.chmod(_OWNER_ONLY)  # before it listens, so no other user can connect
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {address} for HTTP: {error}") from error
    listener.setblocking(False)
    return listener
