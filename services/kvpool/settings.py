"""Settings of the pool service."""

from dataclasses import dataclass

from services.common.logs import LogFormat, LogLevel
from services.common.settings import at_least, between, setting


@dataclass(frozen=True)
class KVPoolSettings:
    """Serves pools of KV-cache blocks with their prefix indexes."""

    address: str = setting(
        "127.0.0.1:9002", doc="where to listen: host:port, port 0 for a free one, or unix:PATH"
    )
    max_pools: int = setting(64, doc="pools that may be open at once", check=at_least(1))
    max_blocks_per_pool: int = setting(
        1_048_576,
        doc="blocks that a pool may have; a snapshot of their hashes must fit into one message",
        check=between(2, 2_000_000),
    )
    watch_buffer_hashes: int = setting(
        65_536,
        doc="hashes that may wait for a watcher of events before it is given a snapshot instead",
        check=at_least(1),
    )
    max_concurrent_rpcs: int = setting(
        1_024, doc="calls served at once, long streams included", check=at_least(1)
    )
    drain_seconds: float = setting(
        5.0, doc="how long running calls may go on after SIGTERM", check=at_least(0)
    )
    metrics_host: str = setting("127.0.0.1", doc="address of the Prometheus metrics")
    metrics_port: int | None = setting(
        None,
        doc="port of the Prometheus metrics, 0 for a free one; none are served without it",
        check=between(0, 65_535),
    )
    otlp_endpoint: str = setting(
        "", doc="where traces go, an OTLP/gRPC URL such as http://127.0.0.1:4317"
    )
    trace_sample_ratio: float = setting(
        1.0, doc="share of traces begun here that are sampled", check=between(0, 1)
    )
    log_level: LogLevel = setting(LogLevel.INFO, doc="what is logged")
    log_format: LogFormat = setting(LogFormat.TEXT, doc="how log lines look")
