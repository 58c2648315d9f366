"""Settings of the viewer."""

from dataclasses import dataclass

from services.common.process.settings import at_least, setting
from services.common.rpc.addresses import is_listen_address


@dataclass(frozen=True, kw_only=True)
class ViewerSettings:
    """The part of GatewaySettings that concerns traces in the gateway's memory, and `/ui`."""

    ui: bool = setting(
        True,
        doc="serve the page /ui, /activity and /traces at http_address too; admin_address always "
        "serves them",
    )
    trace_address: str | None = setting(
        None,
        doc="host:port or unix:PATH that receives the other services' spans over OTLP (their "
        "--otlp-endpoint), for `stepwell trace` and /ui (default: no traces are stored)",
        check=is_listen_address,
    )
    trace_store_max_per_minute: int = setting(
        12,
        doc="requests per minute that are traced for the store, as many at once after a quiet "
        "minute; 0: by --trace-sample-ratio",
        check=at_least(0),
    )
    trace_linger_seconds: float = setting(
        0.0,
        doc="time after the drain in which spans of services that stop later are accepted, until "
        "another SIGTERM",
        check=at_least(0),
    )
