"""Checks the name in the header `Host`.

A web site can make its own name resolve to a loopback address, so that its pages can read the
answers of a local server (DNS rebinding). In these requests `Host` contains the site's name, so
names are checked. An IP address in `Host` is always allowed, because it cannot be rebound.
"""

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.rpc.addresses import is_on_this_machine
from services.gateway.adapters.http.exchange.errors import plain_error_response

ANY = "*"


def hosts_for(listen: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Returns the host names that are served. If no names are allowed explicitly, a server at a
    loopback address serves localhost, and a server at another address serves every name.
    """
    if allowed:
        return tuple(name.lower() for name in allowed)
    is_loopback = is_on_this_machine(listen) and not listen.startswith("unix:")
    return ("localhost",) if is_loopback else (ANY,)


class HostNames:
    """The host names for which a server answers. Every IP address is allowed, too."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def allow(self, host: str) -> bool:
        if ANY in self._names:
            return True
        name = host.lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] or name
        name = name.strip("[]").rstrip(".")
        return name in self._names or _is_address(name)


class HostCheck:
    """Forwards requests whose `Host` is an address or an allowed name. Refuses all others."""

    def __init__(self, app: ASGIApp, names: HostNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = hosts_of(scope)
        if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
            response = plain_error_response(
                400, "the request must have exactly one Host header", scope
            )
            await response(scope, receive, send)
        elif hosts and not self._names.allow(hosts[0]):
            message = (
                "the server does not accept this value of the header Host; see --allowed-hosts"
            )
            await plain_error_response(421, message, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def hosts_of(scope: Scope) -> list[str]:
    """Returns the values of the header `Host`. A valid request has exactly one."""
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]


@lru_cache(maxsize=64)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
