"""Metrics of every process: Prometheus' process metrics, certificates and sent spans."""

from dataclasses import replace

from services.common.telemetry import names
from services.common.telemetry.metric_specs.spec import MetricSpec, Source, counter, gauge

# The first six have the texts of Prometheus' client library, which measures them.
_EVERY = (
    counter(
        names.METRIC_PROCESS_CPU_SECONDS,
        "seconds",
        "Total user and system CPU time spent in seconds.",
    ),
    gauge(names.METRIC_PROCESS_RESIDENT_MEMORY, "bytes", "Resident memory size in bytes."),
    gauge(names.METRIC_PROCESS_VIRTUAL_MEMORY, "bytes", "Virtual memory size in bytes."),
    gauge(
        names.METRIC_PROCESS_START_TIME,
        "seconds",
        "Start time of the process since unix epoch in seconds.",
    ),
    gauge(names.METRIC_PROCESS_OPEN_FDS, "files", "Number of open file descriptors."),
    gauge(names.METRIC_PROCESS_MAX_FDS, "files", "Maximum number of open file descriptors."),
    gauge(
        names.METRIC_TLS_SECONDS_LEFT, "seconds", "Until the certificate expires.", "certificate"
    ),
    counter(
        names.METRIC_TLS_RELOADS,
        "certificates",
        "Certificates that replaced another one.",
        "certificate",
    ),
    counter(
        names.METRIC_TLS_RELOAD_FAILURES,
        "certificates",
        "Replacements that cannot be used; the previous certificate stays in use.",
        "certificate",
    ),
    counter(names.METRIC_SPANS_SENT, "spans", "Spans that the collector accepted."),
    counter(
        names.METRIC_SPANS_DROPPED,
        "spans",
        "Spans that the collector did not accept, by reason.",
        "reason",
    ),
)

SPECS: tuple[MetricSpec, ...] = tuple(replace(spec, source=Source.EVERY) for spec in _EVERY)
