"""The interface of stores of API keys."""

from dataclasses import dataclass
from typing import Protocol

from services.common.keys.api_keys import KeyRecord, TenantRecord
from services.gateway.options.tenants.core.tenant import Tenant


@dataclass(frozen=True, slots=True)
class KnownKey:
    """An API key's record in a store, and the tenant to which the key belongs."""

    record: KeyRecord
    tenant: Tenant

    @classmethod
    def of(cls, key: KeyRecord, tenant: TenantRecord, *, share_cache: bool) -> "KnownKey":
        """Makes a KnownKey from records of the store. If `share_cache` is true, all tenants share
        the prefix cache.
        """
        owner = Tenant(
            key.tenant_id,
            weight=tenant.weight,
            max_retained_share=tenant.max_retained_share,
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
        """Returns a key from memory, or None if the key is not in memory."""

    async def find(self, key_id: str) -> KnownKey | None:
        """Looks up a key that is not in memory. Returns None if the key does not exist. Raises
        Unavailable if the store cannot be read at the moment.
        """
        ...

    async def require_usable(self) -> None:
        """Raises SettingError if a setting is wrong."""
        ...

    async def run(self) -> None:
        """Updates the keys in memory when they change in the store, until cancelled."""
