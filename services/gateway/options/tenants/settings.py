"""Settings of tenants: their keys and queues."""

from dataclasses import dataclass
from pathlib import Path

from services.common.process.settings import at_least, setting


@dataclass(frozen=True, kw_only=True)
class TenantSettings:
    """The part of GatewaySettings that concerns tenants."""

    api_keys: tuple[str, ...] = setting(
        (),
        doc="clients' keys, comma-separated, each with a tenant of its own. Without keys in any "
        "of the three settings, no key is required; with an empty file of keys, no client is "
        "served",
        is_secret=True,
    )
    api_key_file: Path | None = setting(
        None, doc="file with keys and limits of tenants, which `stepwell keys` writes"
    )
    api_keys_in_redis: bool = setting(
        False, doc="keys and limits of tenants are in the Redis of --redis-url"
    )
    api_key_cache_seconds: float = setting(
        3600.0,
        doc="time for which keys that were used remain valid while Redis does not answer; other "
        "keys get 503",
        check=at_least(0),
    )
    share_cache_between_tenants: bool = setting(
        False,
        doc="share the prefix cache between tenants; the time of an answer then reveals what "
        "other tenants have sent",
    )
    max_num_waiting_per_tenant: int = setting(
        256,
        doc="sequences of one tenant that may wait here; further requests get 429. Several "
        "tenants share half of max_concurrent_requests",
        check=at_least(1),
    )
    max_queue_seconds_per_tenant: float = setting(
        60.0,
        doc="time that a tenant's request may wait here; 0: no limit. A request that would wait "
        "longer gets 429",
        check=at_least(0),
    )
