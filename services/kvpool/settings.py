"""Settings of the pool service."""

from dataclasses import dataclass

from services.common.process.service_settings import ServiceSettings, allowed_names
from services.common.process.settings import between, setting, with_default
from services.common.redis.url import is_redis_url
from services.common.rpc.addresses import is_host_port


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolSettings(ServiceSettings):
    """The kvpool: pools of KV-cache blocks with their prefix indexes."""

    address: str = with_default(ServiceSettings, "address", "127.0.0.1:9002")
    internal_tls_allowed_names: tuple[str, ...] = allowed_names()
    metrics_address: str | None = setting(
        None,
        doc="host:port of the Prometheus metrics (default: none are served)",
        check=is_host_port,
    )
    max_blocks_per_pool: int = setting(
        1_048_576,
        doc="most blocks of a pool; bounded, since a snapshot of their hashes must fit in one "
        "message",
        check=between(2, 2_000_000),
    )
    redis_url: str | None = setting(
        None,
        doc="Redis to which the hashes of cached blocks are written: "
        "redis://[user:password@]host:port, or rediss://host:port?ssl_ca_certs=PATH; any node of a "
        "cluster (default: gateways ask the pools)",
        check=is_redis_url,
        is_secret=True,
    )
