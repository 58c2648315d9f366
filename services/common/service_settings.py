"""Settings that every service has: where it listens, its traces, its logs, its time to stop."""

from dataclasses import dataclass

from services.common.addresses import is_listen_address
from services.common.logs import LogFormat, LogLevel
from services.common.settings import between, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """A service's settings extend these. Each gives `address` its default, a port of its own."""

    address: str = setting(
        doc="where gRPC listens: host:port, with port 0 for a free one, or unix:PATH",
        check=is_listen_address,
    )
    drain_seconds: float = setting(
        5.0, doc="how long running calls may take to end after SIGTERM", check=between(0, 3600)
    )
    otlp_endpoint: str = setting(
        "",
        doc="where traces go, an OTLP/gRPC URL such as http://127.0.0.1:4317; empty: no traces",
    )
    trace_sample_ratio: float = setting(
        1.0,
        doc="share of the traces begun here that are recorded; for a trace that was begun "
        "elsewhere its own flag holds",
        check=between(0, 1),
    )
    log_level: LogLevel = setting(LogLevel.INFO, doc="least severe level that is logged")
    log_format: LogFormat = setting(
        LogFormat.TEXT, doc="how a log line looks: text for people, json for programs"
    )
