"""A uvicorn server that runs in the current event loop. Method calls start and stop it."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from services.common.errors import Unavailable
from services.common.rpc.addresses import remove_abandoned
from services.common.tls.credentials import Tls
from services.gateway.adapters.http.transport.connection import GuardedConnection
from services.gateway.adapters.http.transport.connections import Connections
from services.gateway.adapters.http.transport.tls_handshake import TlsContext, TlsHandshake

_SEND_BUFFER_BYTES = 128 * 1024
_BACKLOG = 2048
_UNIX = "unix:"
_OWNER_ONLY = 0o600
_ACCEPTED_A_TURN = 8
"""Number of connections that are accepted in one iteration of the event loop. libuv accepts one
connection per listener and iteration, so each address has this number of duplicate listeners. With
a single listener, new connections would wait long in a burst, because iterations are long then.
"""
_DATE_SECONDS = 1.0
"""Seconds between updates of the Date header in answers."""
_CLOSED_POLL_SECONDS = 0.01


class _Server(uvicorn.Server):
    """A uvicorn server that does not handle signals, and that ends as soon as `end` is called.

    uvicorn's own loop checks only every 0.1 s whether it should end, and then waits 0.1 s for
    connections to close, even if there are none.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._asked = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._asked.set()

    def end_idle(self) -> None:
        """Closes each connection as soon as its requests are answered. A connection that has not
        had a request stays open.
        """
        for connection in list(self.server_state.connections):
            if getattr(connection, "cycle", None) is not None:
                connection.shutdown()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._asked.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no new connections, and waits until all open connections are closed or
        `force_exit` is set. The first request on a connection without requests is still answered.
        """
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        self.end_idle()
        state = self.server_state
        while (state.connections or state.tasks) and not self.force_exit:  # noqa: ASYNC110
            await asyncio.sleep(_CLOSED_POLL_SECONDS)
        for server in self.servers:
            await server.wait_closed()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one application over HTTP at one address. Each connection is a GuardedConnection."""

    def __init__(self, app: ASGIApp, connections: Connections, tls: Tls | None = None) -> None:
        """Raises SettingError if the certificate cannot be used."""
        self.connections = connections
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            http=cast(Any, _protocol(connections, tls)),
            ws="none",
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self._unix_path: Path | None = None

    async def start(self, address: str) -> str:
        """Binds the address and starts serving. Returns the bound address as host:port or
        unix:PATH. Raises Unavailable if the address cannot be bound.
        """
        if address.startswith(_UNIX):
            listener, bound = _bind_unix(address), address
            self._unix_path = Path(address.removeprefix(_UNIX))
        else:
            listener = _bind(address)
            bound = f"{address.rpartition(':')[0]}:{listener.getsockname()[1]}"
        listeners = [listener, *(listener.dup() for _ in range(_ACCEPTED_A_TURN - 1))]
        self._task = asyncio.create_task(self._server.serve(sockets=listeners))
        return bound

    def end_idle(self) -> None:
        """Closes each connection as soon as its requests are answered, so that clients reconnect,
        perhaps to another gateway. New connections are still accepted.
        """
        self.connections.are_ending = True
        self._server.end_idle()

    async def stop(self, grace_seconds: float) -> None:
        """Accepts no new connections, waits at most `grace_seconds` until running requests are
        answered, and then aborts the remaining connections.
        """
        if self._task is None:
            return
        self._server.end()
        await asyncio.wait((self._task,), timeout=grace_seconds)
        state = self._server.server_state
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=grace_seconds)
        self._server.force_exit = True
        await self._task
        if self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)


def _protocol(connections: Connections, tls: Tls | None) -> Callable[..., asyncio.Protocol]:
    """Returns the factory of connections. uvicorn calls it with further arguments for each
    connection.
    """
    plain = partial(GuardedConnection, connections=connections)
    if tls is None:
        return plain
    context = TlsContext(tls)

    def secured(**uvicorn: Any) -> TlsHandshake:
        state = uvicorn["server_state"]
        return TlsHandshake(partial(plain, **uvicorn), connections, context, state)

    return secured


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    is_ipv6 = ":" in host
    try:
        listener = socket.create_server(
            (host, int(port)),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=is_ipv6,
        )
    except (OSError, ValueError, OverflowError) as error:
        # `create_server` appends the address to the system's reason.
        why = str(getattr(error, "strerror", error)).partition(" (while ")[0]
        raise Unavailable(f"cannot listen on {address} for HTTP: {why}") from error
    # Accepted connections inherit both options. By default the kernel would buffer megabytes for a
    # slow reader.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # uvloop alone always sets it
    listener.setblocking(False)
    return listener


def _bind_unix(address: str) -> socket.socket:
    """Binds a socket at unix:PATH, to which only the user of this process can connect, and listens.
    Replaces a socket file that no process uses any more. Raises Unavailable if the address is in
    use or cannot be bound.
    """
    path = Path(address.removeprefix(_UNIX))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_abandoned(path)
        listener.bind(str(path))
        path.chmod(_OWNER_ONLY)  # before `listen`, so that no other user can connect in between
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"cannot listen on {address} for HTTP: {error.strerror or error}"
        ) from error
    listener.setblocking(False)
    return listener
