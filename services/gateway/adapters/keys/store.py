"""The port of stores of API keys."""

from dataclasses import dataclass
from typing import Protocol

from services.common.keys.api_keys import KeyRecord, TenantRecord
from services.gateway.core.tenant import Tenant


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A record, and the tenant of requests that show its key."""

    record: KeyRecord
    tenant: Tenant

    @classmethod
    def of(cls, key: KeyRecord, tenant: TenantRecord, *, share_cache: bool) -> "KnownKey":
        """With `share_cache`, tenants find one another's prompts in the prefix cache."""
        owner = Tenant(
            tenant_id=key.tenant_id,
            weight=tenant.weight,
            requests_per_minute=tenant.requests_per_minute,
            tokens_per_minute=tenant.tokens_per_minute,
            max_concurrent_requests=tenant.max_concurrent_requests,
            priority_ceiling=tenant.priority_ceiling,
            models=None if key.models is None else frozenset(key.models),
            cache_salt="" if share_cache else key.tenant_id,
        )
        return cls(key, owner)


class KeyStore(Protocol):
    """Finds keys by their ids, from what is held in memory wherever that is possible."""

    def known(self, key_id: str) -> KnownKey | None:
        """A key that is in memory; None if it is not, whether it exists or not."""
        ...

    async def find(self, key_id: str) -> KnownKey | None:
        """A key that was not in memory; None if there is none. Raises Unavailable if that cannot be
        said now.
        """
        ...

    async def require_usable(self) -> None:
        """Raises SettingError where a setting is wrong."""
        ...

    async def run(self) -> None:
        """Follows changes until cancelled."""
        ...
