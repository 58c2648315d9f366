"""Checks whether ports of this machine are free, and finds free ports."""

import errno
import random
import socket
from contextlib import suppress
from pathlib import Path

from services.cli.errors import CommandError

_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_EPHEMERAL = 32_768
"""Linux's default start of the ephemeral range, used if the kernel's file cannot be read."""
_LOWEST = 10_000
_TRIES = 100


def claim_port(host: str, port: int, flag: str) -> int:
    """Returns `port` if a server can listen on it, or a free port if `port` is 0. The port is not
    kept open. Raises CommandError, which names `flag`, if no server can listen. A free port is
    below the kernel's ephemeral range. Otherwise the kernel could assign the port to an outgoing
    connection, or to another server that listens on port 0, before the intended server listens.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise CommandError(f"--host {host} is not an address: {error.strerror}") from error
    *first, last = [port] if port else _candidates()
    for candidate in first:
        with suppress(OSError):
            return _listened(family, (address[0], candidate, *address[2:]))
    try:
        return _listened(family, (address[0], last, *address[2:]))
    except OSError as error:
        raise CommandError(_why_not(error, host, port, flag)) from error


def _candidates() -> list[int]:
    """Ports to try, in order. The last one is 0, for which the kernel chooses a port."""
    try:
        end = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = _FIRST_EPHEMERAL
    if end <= _LOWEST + _TRIES:
        return [0]
    return [*random.SystemRandom().sample(range(_LOWEST, end), _TRIES), 0]


def _listened(family: int, address: tuple[object, ...]) -> int:
    with socket.socket(family, socket.SOCK_STREAM) as claimed:
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind(address)
        # Two sockets can be bound to one address, so only listen() reports a conflict.
        claimed.listen(1)
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
