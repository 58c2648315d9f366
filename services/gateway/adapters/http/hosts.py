"""Checks the name in `Host`.

A page of another site can point a name of its own at a loopback address and then read what a local
server answers (DNS rebinding). Such requests carry the site's name in `Host`: they are refused.
An address in `Host` cannot be rebound, and always passes.
"""

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.addresses import is_on_this_machine
from services.gateway.adapters.http.errors import plain_error_response

ANY = "*"


def hosts_for(listen: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names to answer to: those allowed; without any, localhost on loopback, else all."""
    if allowed:
        return tuple(name.lower() for name in allowed)
    is_loopback = is_on_this_machine(listen) and not listen.startswith("unix:")
    return ("localhost",) if is_loopback else (ANY,)


class HostCheck:
    """Passes requests on whose `Host` is an address or one of the names."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
            response = plain_error_response(400, "exactly one Host header is needed")
            await response(scope, receive, send)
        elif hosts and not self._allows(hosts[0].decode("latin-1")):
            message = "this server does not answer to this Host; see --allowed-hosts"
            await plain_error_response(421, message)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        if ANY in self._names:
            return True
        name = host.lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] or name
        name = name.strip("[]").rstrip(".")
        return name in self._names or _address(name) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
