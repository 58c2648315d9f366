"""Settings that every service has. They concern addresses, the certificate with which it connects
to other services, traces, logs, and the drain time.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.process.logs import LogFormat, LogLevel
from services.common.process.settings import between, existing_file, setting
from services.common.rpc.addresses import is_listen_address


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """The base class of each service's settings. Subclasses define a default port of `address`."""

    address: str = setting(
        doc="where gRPC listens: host:port, with port 0 for a free one, or unix:PATH",
        check=is_listen_address,
    )
    health_address: str | None = setting(
        None,
        doc="where grpc.health.v1 alone is served, without TLS and keys, for probes: host:port or "
        "unix:PATH (default: only at the address of gRPC)",
        check=is_listen_address,
    )
    health_file: Path | None = setting(
        None,
        doc="file that is written every second with the service's health, for probes that cost "
        "nothing, such as deploy/docker/probe.sh (default: none)",
    )
    internal_tls_cert_file: Path | None = setting(
        None,
        doc="certificate chain (PEM) that this service shows to the other services. With it, key "
        "and authority they speak TLS over the network, and each must show a certificate; sockets "
        "of this machine stay as they are (default: no TLS)",
        check=existing_file,
    )
    internal_tls_key_file: Path | None = setting(
        None, doc="key of that certificate (PEM)", check=existing_file
    )
    internal_tls_ca_file: Path | None = setting(
        None,
        doc="authorities (CA, PEM) that certificates of the other services must come from",
        check=existing_file,
    )
    drain_seconds: float = setting(
        5.0, doc="how long running calls may take to end after SIGTERM", check=between(0, 3600)
    )
    otlp_endpoint: str = setting(
        "",
        doc="where traces go, an OTLP/gRPC URL such as http://127.0.0.1:4317, or several with "
        "commas, each of which gets all; empty: no traces",
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


def allowed_names() -> Any:
    """Defines the setting `allowed_names` of a service that is called by other services."""
    return setting(
        (),
        doc="subject alternative names, comma-separated, of which one must be in the certificate "
        "of a service that calls this one; empty: any certificate of the authority will do",
    )


def server_name() -> Any:
    """Defines the setting `server_name` of a service that calls other services."""
    return setting(
        None,
        doc="name that must be in the certificates of the services called here, where it is not "
        "the host of their address",
    )
