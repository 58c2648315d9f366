"""Metrics over OTLP, if an endpoint is set; Prometheus reads its own elsewhere."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from services.common.service_settings import ServiceSettings
from services.common.span_sender import LAST_EXPORT_SECONDS

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
    provider = MeterProvider(
        [_otlp_reader(settings.otlp_endpoint)],
        Resource.create({"service.name": f"stepwell-{service}", "service.namespace": "stepwell"}),
        shutdown_on_exit=False,
    )
    try:
        yield provider.get_meter("stepwell")
    finally:
        _shut_down(provider)


def _shut_down(provider: MeterProvider) -> None:
    """Sends what is left, within LAST_EXPORT_SECONDS."""
    sending = threading.Thread(target=provider.shutdown, name="last metrics", daemon=True)
    sending.start()
    sending.join(LAST_EXPORT_SECONDS)
    if sending.is_alive():
        logger.warning(
            "the collector did not take the last metrics within %g s", LAST_EXPORT_SECONDS
        )


def _otlp_reader(endpoint: str) -> MetricReader:
    # Imported here: without an endpoint no process pays for loading the exporter.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415
        OTLPMetricExporter,
    )

    exporter = OTLPMetricExporter(endpoint, insecure=not endpoint.startswith("https://"))
    return PeriodicExportingMetricReader(exporter)
