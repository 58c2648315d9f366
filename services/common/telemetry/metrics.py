"""Serves metrics over HTTP, for Prometheus."""

import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from services.common.errors import Unavailable
from services.common.rpc.addresses import join_host_port, split_host_port
from services.common.telemetry.exposition import (
    CONTENT_TYPE,
    OPEN_METRICS_TYPE,
    open_metrics,
    wants_open_metrics,
)

logger = logging.getLogger(__name__)

_CONNECTION_SECONDS = 10.0

Render = Callable[[bool], bytes]
"""Returns the metrics in text format 0.0.4. The argument is whether to include exemplars."""


@contextmanager
def serving_metrics(render: Render, address: str | None) -> Iterator[str | None]:
    """Serves the text of `render` over HTTP on host:port in threads, and yields the bound address.
    Serves nothing if `address` is None. Raises Unavailable if the address cannot be bound.
    """
    if address is None:
        yield None
        return
    host, port = split_host_port(address)
    try:
        server = _MetricsServer(host, port, render)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics on {address}: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    bound = join_host_port(host, server.server_port)
    logger.info("serving metrics", extra={"address": bound})
    try:
        yield bound
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, render: Render) -> None:
        self.render = render
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _MetricsHandler)

    def server_bind(self) -> None:
        # HTTPServer looks up the host's name, which may take seconds and is not needed here.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, _request: object, _client_address: object) -> None:
        """Logs why a response failed, except if the client closed the connection first."""
        if not isinstance(sys.exception(), ConnectionError):
            logger.exception("metrics cannot be served")


class _MetricsHandler(BaseHTTPRequestHandler):
    timeout = _CONNECTION_SECONDS
    server: _MetricsServer

    def do_GET(self) -> None:
        is_open = wants_open_metrics(self.headers.get("Accept", ""))
        text = self.server.render(is_open)
        body = open_metrics(text) if is_open else text
        self.send_response(200)
        self.send_header("Content-Type", OPEN_METRICS_TYPE if is_open else CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Does nothing, so that scrapes are not logged."""
