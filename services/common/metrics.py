"""Prometheus metrics of a service, read from its own counts when somebody asks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from services.common.errors import Unavailable

logger = logging.getLogger(__name__)


@contextmanager
def serving_metrics(collector: Collector, host: str, port: int | None) -> Iterator[None]:
    """Serves a collector over HTTP, from a thread of its own; not at all without a port.

    Raises Unavailable when the port is taken.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise Unavailable(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    logger.info("serving metrics", extra={"address": f"{host}:{server.server_port}"})
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
