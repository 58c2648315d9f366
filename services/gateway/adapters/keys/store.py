"""The interface of stores of API keys."""

from dataclasses import dataclass
from typing import Protocol

from services.common.keys.api_keys import KeyRecord, TenantRecord
from services.gateway.core.tenant import Tenant


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key's record, and the tenant of requests with this key."""

    record: KeyRecord
    tenant: Tenant

    @classmethod
    def of(cls, key: KeyRecord, tenant: TenantRecord, *, share_cache: bool) -> "KnownKey":
        """With `share_cache`, the tenants share the prefix cache."""
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
    """Finds keys by their ids, from memory if possible."""

    def known(self, key_id: str) -> KnownKey | None:
        """The key if it is in memory. None does not mean that the key does not exist."""
        ...

    async def find(self, key_id: str) -> KnownKey | None:
        """Looks up a key that was not in memory; None if it does not exist. Raises Unavailable if
        the lookup is not possible now.
        """
        ...

    async def require_usable(self) -> None:
        """Raises SettingError if a setting is wrong."""
        ...

    async def run(self) -> None:
        """Follows changes until cancelled."""
        ...
