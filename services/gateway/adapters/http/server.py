"""An uvicorn server inside this process's event loop, which ends when it is told to."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from services.common.errors import Unavailable
from services.gateway.adapters.http.connection import GuardedConnection
from services.gateway.adapters.http.connection_limits import ConnectionLimits
from services.gateway.adapters.http.doorway import Doorway

_SEND_BUFFER_BYTES = 128 * 1024
_BACKLOG = 2048


class _Quiet(uvicorn.Server):
    """Leaves signals to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an application on one address."""

    def __init__(
        self, app: ASGIApp, limits: ConnectionLimits, on_reader_cut: Callable[[], None]
    ) -> None:
        self.doorway = Doorway(limits, on_reader_cut)
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            http=cast(Any, partial(GuardedConnection, doorway=self.doorway)),
            ws="none",
        )
        self._server = _Quiet(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, address: str) -> str:
        """Binds and serves; returns host:port. Raises Unavailable when it cannot be bound."""
        listener = _bind(address)
        host, port = address.rpartition(":")[0], listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return f"{host}:{port}"

    async def stop(self, grace_seconds: float) -> None:
        """Takes no new connections, gives running exchanges the grace, then cuts them off."""
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait((self._task,), timeout=grace_seconds)
        state = self._server.server_state
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=grace_seconds)
        self._server.force_exit = True
        await self._task


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it; the kernel would give a slow reader megabytes.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind((host, int(port)))
        listener.listen(_BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        listener.close()
        raise Unavailable(f"cannot listen on {address} for HTTP: {error}") from error
    listener.setblocking(False)
    return listener
