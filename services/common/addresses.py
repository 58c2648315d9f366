"""Addresses in settings: host:port, with brackets around an IPv6 address, or unix:PATH."""

_UNIX = "unix:"
LARGEST_PORT = 65_535


def split_host_port(address: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises ValueError if the address is not host:port."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > LARGEST_PORT:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_host_port(host: str, port: int) -> str:
    """`host:port` as URLs and gRPC write it; an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host_port(value: str) -> str | None:
    """A check of a setting: the address is host:port."""
    try:
        split_host_port(value)
    except ValueError:
        return "must be host:port"
    return None


def is_listen_address(value: str) -> str | None:
    """A check of a setting: the address is host:port or unix:PATH."""
    if value.startswith(_UNIX) and value != _UNIX:
        return None
    return None if is_host_port(value) is None else "must be host:port or unix:PATH"
