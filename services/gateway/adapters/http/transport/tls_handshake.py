"""A connection from its start to the end of its TLS handshake."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import cast

from uvicorn.server import ServerState

from services.common.process.settings import SettingError
from services.common.tls.certificates import Certificate
from services.common.tls.credentials import Tls
from services.gateway.adapters.http.transport.connection import CLOSING_SECONDS
from services.gateway.adapters.http.transport.connections import Connections
from services.gateway.adapters.http.transport.reader_timeout import LEAST_BYTES

logger = logging.getLogger(__name__)


class TlsContext:
    """Provides the SSLContext for each handshake, and makes a new one if the certificate
    changed.
    """

    def __init__(self, tls: Tls) -> None:
        """Raises SettingError if OpenSSL refuses the certificate, for example because its key is
        too short.
        """
        self._watch = tls.watch
        self._certificate = self._watch.current
        self._refused: Certificate | None = None
        try:
            self._context = self._make()
        except (ssl.SSLError, OSError) as error:
            raise SettingError(str(self._watch.files.cert.error(_refusal(error)))) from error

    def current(self) -> ssl.SSLContext:
        wanted = self._watch.current
        if wanted is not self._certificate and wanted is not self._refused:
            try:
                self._context = self._make()
                self._certificate = wanted
            except (ssl.SSLError, OSError) as error:
                self._refused = wanted
                complaint = self._watch.files.cert.error(_refusal(error))
                logger.warning("%s; HTTP still uses the previous certificate", complaint)
        return self._context

    def _make(self) -> ssl.SSLContext:
        files = self._watch.files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert.path, files.key.path)
        context.set_alpn_protocols(["http/1.1"])
        if files.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(files.ca.path)
        return context


def _refusal(error: OSError) -> str:
    reason = getattr(error, "reason", None) or str(error)
    return f"is refused by OpenSSL: {reason.replace('_', ' ').lower()}"


class TlsHandshake(asyncio.Protocol):
    """Performs the TLS handshake of a connection, and then replaces itself by the connection's HTTP
    protocol. The connection is counted from the start, so the limits on the number of connections
    and on time also apply to clients that never finish the handshake.
    """

    def __init__(
        self,
        make_connection: Callable[[], asyncio.Protocol],
        connections: Connections,
        tls: TlsContext,
        state: ServerState,
    ) -> None:
        self._make_connection = make_connection
        self._connections = connections
        self._tls = tls
        self._open = state.connections
        self._loop = asyncio.get_running_loop()
        self._undecrypted: list[bytes] | None = []
        self._early: list[bytes] = []
        self._has_ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        # The buffer should be small, because ReaderTimeout does not count its encrypted data.
        transport.set_write_buffer_limits(high=LEAST_BYTES, low=0)
        if not self._connections.admit(self):
            transport.abort()
            return
        self._open.add(self)  # type: ignore[arg-type] # has the attributes that uvicorn needs
        self._task = self._loop.create_task(self._serve(), name="TLS handshake")

    def data_received(self, data: bytes) -> None:
        """Buffers data that arrives too early: the start of the handshake before the TLS protocol
        is installed (uvloop reads from each new connection at once), or a request together with the
        end of the handshake.
        """
        (self._early if self._undecrypted is None else self._undecrypted).append(data)

    def connection_lost(self, _: Exception | None) -> None:
        self._has_ended = True

    def shutdown(self) -> None:
        """uvicorn calls this when the server stops."""
        self.end()

    def end(self) -> None:
        self._has_ended = True
        # Aborted in the next iteration, because the event loop may be about to read from the
        # transport.
        self._loop.call_soon(self.transport.abort)

    async def _serve(self) -> None:
        secured = None if self._has_ended else await self._shake_hands()
        self._open.discard(self)
        self._connections.remove(self)
        if secured is not None and not secured.is_closing() and not self._has_ended:
            self._hand_over(secured)

    async def _shake_hands(self) -> asyncio.Transport | None:
        """Returns the transport of decrypted data, or None if the handshake failed."""
        handshake = self._loop.start_tls(
            self.transport,
            self,
            self._tls.current(),
            server_side=True,
            ssl_handshake_timeout=self._connections.limits.receive_timeout_seconds,
            ssl_shutdown_timeout=CLOSING_SECONDS,
        )
        try:
            beginning = self._loop.create_task(handshake, name="start_tls")
            # `start_tls` pauses reading in its first iteration and resumes it in the next one.
            # Buffered data is forwarded in that second iteration, before more data can arrive.
            self._loop.call_soon(self._loop.call_soon, self._pass_on)
            return await beginning
        except OSError as error:
            self._connections.refusals.count(_why_failed(error))
            return None

    def _pass_on(self) -> None:
        undecrypted, self._undecrypted = b"".join(self._undecrypted or ()), None
        tls = cast(asyncio.BufferedProtocol, self.transport.get_protocol())
        while undecrypted and not self.transport.is_closing():
            buffer = memoryview(tls.get_buffer(len(undecrypted)))
            size = min(len(buffer), len(undecrypted))
            buffer[:size] = undecrypted[:size]
            tls.buffer_updated(size)
            undecrypted = undecrypted[size:]

    def _hand_over(self, secured: asyncio.Transport) -> None:
        connection = self._make_connection()
        secured.set_protocol(connection)
        connection.connection_made(secured)
        for data in self._early:
            connection.data_received(data)


def _why_failed(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "an error without a reason").replace("_", " ").lower()
        return f"the TLS handshake failed: {reason}"
    if isinstance(error, ConnectionAbortedError):
        return "the TLS handshake did not end within the time limit"
    return "the client left during the TLS handshake"
