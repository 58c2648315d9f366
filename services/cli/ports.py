"""Ports of this machine: whether one is free, or which one is."""

import errno
import socket

from services.cli.errors import CommandError


def claim_port(host: str, port: int, flag: str) -> int:
    """The port itself if a server could listen there, or a free one for port 0; closed again before
    this returns. Raises CommandError, naming `flag`, if a server could not listen there.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise CommandError(f"--host {host} is not an address: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as claimed:
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            claimed.bind(address)
            # Two sockets may share an address until one of them listens.
            claimed.listen(1)
        except OSError as error:
            raise CommandError(_why_not(error, host, port, flag)) from error
        return int(claimed.getsockname()[1])


def _why_not(error: OSError, host: str, port: int, flag: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} of {host} is taken; choose another one with {flag}"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is not an address of this machine"
        case errno.EACCES:
            return f"port {port} needs privileges; choose one above 1023 with {flag}"
        case _:
            return f"cannot listen on port {port} of {host}: {error.strerror}"
