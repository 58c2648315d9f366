"""Settings of every service: addresses, certificate, traces, logs, and the drain time."""

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
        doc="where gRPC listens: host:port (port 0: a free one) or unix:PATH",
        check=is_listen_address,
    )
    health_address: str | None = setting(
        None,
        doc="host:port or unix:PATH that serves only grpc.health.v1, for probes, without TLS "
        "and keys (default: probes must use the address of gRPC)",
        check=is_listen_address,
    )
    health_file: Path | None = setting(
        None,
        doc="file with the service's health, written every second, for probes such as "
        "deploy/docker/probe.sh",
    )
    internal_tls_cert_file: Path | None = setting(
        None,
        doc="certificate chain (PEM) for the other services. With it, the key and the authority, "
        "services use mutual TLS over the network, and no TLS over Unix sockets (default: no TLS)",
        check=existing_file,
    )
    internal_tls_key_file: Path | None = setting(
        None, doc="key of that certificate (PEM)", check=existing_file
    )
    internal_tls_ca_file: Path | None = setting(
        None, doc="authorities (PEM) of the other services' certificates", check=existing_file
    )
    drain_seconds: float = setting(
        5.0, doc="time for running calls to end after SIGTERM", check=between(0, 3600)
    )
    otlp_endpoint: str = setting(
        "",
        doc="OTLP/gRPC URLs that receive traces, comma-separated; each receives all (default: no "
        "traces)",
    )
    trace_sample_ratio: float = setting(
        1.0,
        doc="share of the traces begun by this service that are recorded; traces begun elsewhere "
        "are recorded if their sampled flag is set",
        check=between(0, 1),
    )
    log_level: LogLevel = setting(LogLevel.INFO, doc="least severe level that is logged")
    log_format: LogFormat = setting(LogFormat.TEXT, doc="format of log lines: text or json")


def allowed_names() -> Any:
    """Defines the setting `allowed_names` of a service that is called by other services."""
    return setting(
        (),
        doc="subject alternative names, comma-separated; the certificate of a service that calls "
        "this service must have one of them; empty: any certificate of the authority is accepted",
    )


def server_name() -> Any:
    """Defines the setting `server_name` of a service that calls other services."""
    return setting(
        None,
        doc="name that the certificates of called services must have, if the name differs from "
        "the host of their address",
    )
