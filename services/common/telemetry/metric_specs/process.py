"""Metrics of every process: Prometheus' process metrics, its version, certificates and spans."""

from services.common.telemetry.metric_specs.spec import Source, Specs

_specs = Specs(Source.EVERY)
# The first six metrics have the names and help texts of Prometheus' client library.
PROCESS_CPU_SECONDS = _specs.counter(
    "process_cpu_seconds", "seconds", "Total user and system CPU time spent in seconds."
)
PROCESS_RESIDENT_MEMORY = _specs.gauge(
    "process_resident_memory_bytes", "bytes", "Resident memory size in bytes."
)
PROCESS_VIRTUAL_MEMORY = _specs.gauge(
    "process_virtual_memory_bytes", "bytes", "Virtual memory size in bytes."
)
PROCESS_START_TIME = _specs.gauge(
    "process_start_time_seconds",
    "seconds",
    "Start time of the process since unix epoch in seconds.",
)
PROCESS_OPEN_FDS = _specs.gauge("process_open_fds", "files", "Number of open file descriptors.")
PROCESS_MAX_FDS = _specs.gauge(
    "process_max_fds", "files", "Maximum number of open file descriptors."
)
BUILD_INFO = _specs.gauge(
    "stepwell_build_info",
    "",
    "Always 1; the labels have the version and the number of the protocol between services.",
    *("version", "protocol"),
)
TLS_SECONDS_LEFT = _specs.gauge(
    "stepwell_tls_certificate_seconds_left",
    "seconds",
    "Time until the certificate expires.",
    "certificate",
)
TLS_RELOADS = _specs.counter(
    "stepwell_tls_reloads",
    "certificates",
    "Certificates that replaced a certificate in use.",
    "certificate",
)
TLS_FILES_USABLE = _specs.gauge(
    "stepwell_tls_files_usable",
    "",
    "Whether the files of the certificate can be used (1) or not (0); with 0 the previous "
    "certificate stays in use.",
    "certificate",
)
SPANS_SENT = _specs.counter(
    "stepwell_trace_spans_sent", "spans", "Spans that the collector accepted."
)
SPANS_DROPPED = _specs.counter(
    "stepwell_trace_spans_dropped",
    "spans",
    "Spans that were dropped before a collector accepted them, by reason.",
    "reason",
)

SPECS = _specs.all
