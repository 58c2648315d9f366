"""Checks the name in `Host`.

A page of another site can point a name of its own at a loopback address and then read what a local
server answers (DNS rebinding). Such requests carry the site's name in `Host`: they are refused.
An address in `Host` cannot be rebound, and always passes.
"""

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.rpc.addresses import is_on_this_machine
from services.gateway.adapters.http.exchange.errors import plain_error_response

ANY = "*"


def hosts_for(listen: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names to answer to: those allowed; without any, localhost on loopback, else all."""
    if allowed:
        return tuple(name.lower() for name in allowed)
    is_loopback = is_on_this_machine(listen) and not listen.startswith("unix:")
    return ("localhost",) if is_loopback else (ANY,)


class HostNames:
    """The names that a server answers to, besides every address."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def allow(self, host: str) -> bool:
        """Whether a `Host` of that value is answered."""
        if ANY in self._names:
            return True
        name = host.lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] or name
        name = name.strip("[]").rstrip(".")
        return name in self._names or _is_address(name)


class HostCheck:
    """Passes requests on whose `Host` is an address or one of the names."""

    def __init__(self, app: ASGIApp, names: HostNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = hosts_of(scope)
        if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
            response = plain_error_response(400, "exactly one Host header is needed", scope)
            await response(scope, receive, send)
        elif hosts and not self._names.allow(hosts[0]):
            message = "this server does not answer to this Host; see --allowed-hosts"
            await plain_error_response(421, message, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def hosts_of(scope: Scope) -> list[str]:
    """The values of `Host`; a request has one."""
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]


@lru_cache(maxsize=64)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
