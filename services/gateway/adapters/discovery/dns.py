"""Finds schedulers by a DNS name, such as the name of a headless service of Kubernetes."""

import asyncio
import socket

from services.common.errors import Unavailable
from services.common.rpc.addresses import DNS, join_host_port, split_host_port

LOOK_SECONDS = 3.0


async def resolve(value: str) -> set[str]:
    """All addresses of dns:NAME:PORT, with the port. Raises Unavailable.

    The duration is bounded by the system's resolver, mostly to a few seconds.
    """
    name, port = split_host_port(value.removeprefix(DNS))
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unavailable(f"{name} cannot be resolved: {error}") from error
    return {join_host_port(str(address[0]), port) for *_, address in found}
