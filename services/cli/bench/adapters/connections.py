import asyncio
import ssl
from collections.abc import Callable

from services.cli.bench.adapters.connection import Connection, Reply
from services.cli.bench.core.record import Failure

_CONNECT_SECONDS = 10.0


class Connections:
    """Each concurrent request has its own connection. The last idle one is reused first."""

    def __init__(
        self, host: str, port: int, clock: Callable[[], float], tls: ssl.SSLContext | None = None
    ) -> None:
        self._host, self._port, self._clock, self._tls = host, port, clock, tls
        self._idle: list[Connection] = []

    async def open(self, number: int) -> None:
        """Opens idle connections, so that a load does not measure connecting."""
        while len(self._idle) < number:
            self._idle.append(await self._connect())

    async def exchange(self, request: bytes, reply: Reply) -> Failure | None:
        """Sends a request and waits for its whole response. Returns why it is incomplete."""
        connection = self._take_idle()
        if connection is None:
            try:
                connection = await self._connect()
            except (OSError, TimeoutError) as error:
                return Failure("connect", str(error) or "no connection in time")
        failure = await connection.exchange(request, reply)
        if connection.is_idle:
            self._idle.append(connection)
        return failure

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(
            lambda: Connection(self._clock), self._host, self._port, ssl=self._tls
        )
        _, connection = await asyncio.wait_for(connecting, _CONNECT_SECONDS)
        return connection
