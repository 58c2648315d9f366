"""Metrics over OTLP, if an endpoint is set; Prometheus reads its own elsewhere."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.sdk.resources import Resource

from services.common.process.service_settings import ServiceSettings
from services.common.telemetry.span_sender import LAST_EXPORT_SECONDS

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

logger = logging.getLogger(__name__)


@contextmanager
def service_meter(service: str, settings: ServiceSettings) -> Iterator[Meter]:
    """A meter whose instruments are sent to the endpoint of the settings, each minute or as
    OTEL_METRIC_EXPORT_INTERVAL says, in milliseconds; without an endpoint, or where
    OTEL_METRICS_EXPORTER is "none", they do nothing. At the end, what is left is sent.
    """
    if not settings.otlp_endpoint or os.environ.get("OTEL_METRICS_EXPORTER") == "none":
        yield NoOpMeter("stepwell")
        return
    provider = _otlp_provider(service, settings.otlp_endpoint)
    try:
        yield provider.get_meter("stepwell")
    finally:
        _shut_down(provider)


def _shut_down(provider: "MeterProvider") -> None:
    """Sends what is left, within LAST_EXPORT_SECONDS."""
    sending = threading.Thread(target=provider.shutdown, name="last metrics", daemon=True)
    sending.start()
    sending.join(LAST_EXPORT_SECONDS)
    if sending.is_alive():
        logger.warning(
            "the collector did not take the last metrics within %g s", LAST_EXPORT_SECONDS
        )


def _otlp_provider(service: str, endpoint: str) -> "MeterProvider":
    # Imported here: without an endpoint no process pays for loading them.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415
        OTLPMetricExporter,
    )
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

    return MeterProvider(
        [
            PeriodicExportingMetricReader(
                OTLPMetricExporter(url, insecure=not url.startswith("https://"))
            )
            for url in map(str.strip, endpoint.split(","))
        ],
        Resource.create({"service.name": f"stepwell-{service}", "service.namespace": "stepwell"}),
        shutdown_on_exit=False,
    )
