"""A key book, which has the records of all API keys and tenants, and the book's JSON text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.keys import api_keys


@dataclass(frozen=True, slots=True)
class KeyBook:
    """Maps ids to the records of keys and tenants. A tenant without a record has no limits."""

    keys: Mapping[str, api_keys.KeyRecord] = field(default_factory=dict)
    tenants: Mapping[str, api_keys.TenantRecord] = field(default_factory=dict)

    def tenant_of(self, key: api_keys.KeyRecord) -> api_keys.TenantRecord:
        return self.tenants.get(key.tenant_id) or api_keys.TenantRecord(key.tenant_id)

    def with_key(
        self, key: api_keys.KeyRecord, tenant: api_keys.TenantRecord | None = None
    ) -> "KeyBook":
        """Returns a copy with this key's record and, if given, its tenant's record."""
        tenants = {} if tenant is None else {tenant.tenant_id: tenant}
        return KeyBook({**self.keys, key.key_id: key}, {**self.tenants, **tenants})


def book_to_text(book: KeyBook) -> str:
    """Encodes a book as JSON: `{"tenants": {NAME: limits}, "keys": {ID: record}}`."""
    tenants = {name: api_keys.tenant_to_json(tenant) for name, tenant in book.tenants.items()}
    keys = {key_id: api_keys.key_to_json(key) for key_id, key in book.keys.items()}
    return json.dumps({"tenants": tenants, "keys": keys}, indent=2) + "\n"


def book_from_text(text: str | bytes) -> KeyBook:
    """The inverse of `book_to_text`. Empty text is an empty book. Raises DamagedRecord."""
    if not text.strip():
        return KeyBook()
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise api_keys.DamagedRecord(f"it is not JSON: {error}") from error
    if not isinstance(whole, dict) or whole.keys() - {"tenants", "keys"}:
        raise api_keys.DamagedRecord("it is no JSON object with tenants and keys")
    tenants, keys = whole.get("tenants", {}), whole.get("keys", {})
    if not isinstance(tenants, dict) or not isinstance(keys, dict):
        raise api_keys.DamagedRecord("tenants and keys must be JSON objects")
    return KeyBook(
        {key_id: api_keys.key_from_json(key_id, value) for key_id, value in keys.items()},
        {name: api_keys.tenant_from_json(name, value) for name, value in tenants.items()},
    )
