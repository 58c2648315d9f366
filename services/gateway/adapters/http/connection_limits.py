"""What one HTTP connection and all of them together may cost."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of the HTTP server; docs of the settings of the same names say more."""

    max_connections: int
    max_header_bytes: int
    max_body_bytes: int
    header_timeout_seconds: float
    body_timeout_seconds: float
    keep_alive_seconds: float
    reader_timeout_seconds: float
