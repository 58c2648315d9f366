"""Bounds on one HTTP connection and on all of them together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of the HTTP server; see the settings of the same names."""

    max_connections: int
    max_header_bytes: int
    max_body_bytes: int
    header_timeout_seconds: float
    body_timeout_seconds: float
    keep_alive_seconds: float
    reader_timeout_seconds: float
