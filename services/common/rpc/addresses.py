"""Addresses in settings have the form host:port or unix:PATH. IPv6 addresses have brackets. A
setting that may name several addresses also accepts dns:NAME:PORT.
"""

import errno
import ipaddress
import socket
from contextlib import suppress
from pathlib import Path

_UNIX = "unix:"
DNS = "dns:"
LARGEST_PORT = 65_535


def split_host_port(address: str) -> tuple[str, int]:
    """Returns host, without brackets, and port. Raises ValueError if the format is wrong."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > LARGEST_PORT:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_host_port(host: str, port: int) -> str:
    """Returns `host:port` as in URLs and gRPC, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_on_this_machine(address: str) -> bool:
    """Whether the address is a loopback address or a Unix socket."""
    if is_unix_address(address):
        return True
    host, _ = split_host_port(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_host_port(value: str) -> str | None:
    """Returns an error text if a setting is not host:port, otherwise None."""
    try:
        split_host_port(value)
    except ValueError:
        return "must be host:port"
    return None


def is_listen_address(value: str) -> str | None:
    """Returns an error text if a setting is not host:port or unix:PATH, otherwise None."""
    if is_unix_address(value) and value != _UNIX:
        return None
    return None if is_host_port(value) is None else "must be host:port or unix:PATH"


def is_unix_address(address: str) -> bool:
    return address.startswith(_UNIX)


def unix_path(address: str) -> str:
    return address.removeprefix(_UNIX)


def is_wildcard(address: str) -> bool:
    """Whether host:port stands for all addresses of the machine. Clients cannot connect to it."""
    host, _ = split_host_port(address)
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a host name, or an empty host
        return not host


def is_connect_address(value: str) -> str | None:
    """Returns an error text if clients cannot connect to a setting's address, otherwise None."""
    if (complaint := is_listen_address(value)) is not None or is_unix_address(value):
        return complaint
    if is_wildcard(value) or split_host_port(value)[1] == 0:
        return "must be an address that can be connected to, host:port or unix:PATH"
    return None


def is_dns_address(value: str) -> str | None:
    """Returns an error text if a setting is not dns:NAME:PORT, otherwise None."""
    name, colon, port = value.removeprefix(DNS).rpartition(":")
    if is_host_port(colon + port) is not None or not name or set("/:") & set(name):
        return "must be dns:NAME:PORT"
    return None


def remove_abandoned(path: Path) -> None:
    """Removes the Unix socket of an ended process, so that the path can be bound again. Sockets
    with a listening process are not removed. Other kinds of files are not removed either.
    """
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # so that connect fails at once if the backlog is full
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                with suppress(FileNotFoundError):
                    path.unlink()
