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
        doc="requests per minute that are traced for the store, all of them at once after a minute "
        "without requests; 0: the share --trace-sample-ratio is traced",
        check=at_least(0),
    )
    trace_linger_seconds: float = setting(
        0.0,
        doc="time for which the gateway still accepts other services' spans after its drain, until "
        "another SIGTERM",
        check=at_least(0),
    )
