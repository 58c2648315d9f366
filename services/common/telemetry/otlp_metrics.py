"""Sends metrics over OTLP if an endpoint is set. Prometheus' metrics are served separately."""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.sdk.resources import Resource

from services.common.process.service_settings import ServiceSettings
from services.common.telemetry.span_sender import LAST_EXPORT_SECONDS
from services.common.telemetry.tracing import endpoint_urls

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

logger = logging.getLogger(__name__)


@contextmanager
def service_meter(service: str, settings: ServiceSettings) -> Iterator[Meter]:
    """Yields a meter whose values are sent to the endpoint of the settings. The interval is one
    minute, or OTEL_METRIC_EXPORT_INTERVAL in milliseconds. Nothing is sent without an endpoint, or
    if OTEL_METRICS_EXPORTER is "none". Remaining values are sent when the `with` block ends.
    """
    urls = endpoint_urls(settings.otlp_endpoint)
    if not urls or os.environ.get("OTEL_METRICS_EXPORTER") == "none":
        yield NoOpMeter("stepwell")
        return
    provider = _otlp_provider(service, urls)
    try:
        yield provider.get_meter("stepwell")
    finally:
        _shut_down(provider)


def _shut_down(provider: "MeterProvider") -> None:
    sending = threading.Thread(target=provider.shutdown, name="last metrics", daemon=True)
    sending.start()
    sending.join(LAST_EXPORT_SECONDS)
    if sending.is_alive():
        logger.warning(
            "the collector did not accept the last metrics within %g s", LAST_EXPORT_SECONDS
        )


def _otlp_provider(service: str, urls: Sequence[str]) -> "MeterProvider":
    # Imported here, so that processes without an endpoint do not load these modules.
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
            for url in urls
        ],
        Resource.create({"service.name": f"stepwell-{service}", "service.namespace": "stepwell"}),
        shutdown_on_exit=False,
    )
