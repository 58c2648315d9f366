"""The format of API keys, and the stored records of keys and tenants. A key is `sk-<id>-<32 random
bytes>`. Only the key's SHA-256 is stored. Keys are random, so no slower hash is needed. The id is
not secret, and is used to look up the key's record.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from enum import Enum
from typing import Any

_KEY = re.compile(r"sk-([a-z0-9]{12})-[A-Za-z0-9_-]{43}")
_KEY_ID = re.compile(r"[a-z0-9]{12}")
_TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_LIMIT = 10**9
MAX_WEIGHT = 1000.0


class DamagedRecord(ValueError):
    """The record of a key or a tenant is invalid. The message explains why."""


class KeyState(Enum):
    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The stored record of a key. Times are seconds since 1970."""

    key_id: str
    sha256: str
    """SHA-256 of the whole key, in hexadecimal."""
    tenant_id: str
    created: int
    expires: int | None = None
    """The time at which the key expires. None means never."""
    revoked: int | None = None
    """The time at which the key was revoked. None means that the key is not revoked."""
    models: tuple[str, ...] | None = None
    """Models for which the key may be used. None means all."""

    def matches(self, key: bytes) -> bool:
        """Whether this record belongs to the whole key `key`. Compares in constant time."""
        return hmac.compare_digest(hashlib.sha256(key).hexdigest(), self.sha256)

    def state(self, now: float) -> KeyState:
        if self.revoked is not None:
            return KeyState.REVOKED
        is_over = self.expires is not None and now >= self.expires
        return KeyState.EXPIRED if is_over else KeyState.ACTIVE


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """The limits of a tenant, which apply to all its keys together. None means no limit."""

    tenant_id: str
    weight: float = 1.0
    """The tenant's weight when requests of several tenants compete for capacity."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Limit on the tokens per minute. Generated tokens and uncached prompt tokens count."""
    max_concurrent_requests: int | None = None
    priority_ceiling: int | None = None
    """The smallest `priority` that the tenant's requests can have. Smaller values run earlier."""
    max_retained_share: float = 1.0
    """Limit on the KV blocks kept for agents' next requests, as a fraction of a replica's."""


def new_key(draw: Callable[[int], bytes] = secrets.token_bytes) -> tuple[str, str, str]:
    """Returns a new key, its id, and its SHA-256 in hexadecimal. `draw(n)` draws n bytes."""
    key_id = base64.b32encode(draw(8)).decode().lower()[:12]
    secret = base64.urlsafe_b64encode(draw(32)).decode().rstrip("=")
    key = f"sk-{key_id}-{secret}"
    return key, key_id, hashlib.sha256(key.encode()).hexdigest()


def key_id_of(key: str) -> str | None:
    """The id in a key, or None if the text is not a well-formed key."""
    match = _KEY.fullmatch(key)
    return None if match is None else match[1]


def is_tenant_id(name: str) -> bool:
    """Whether the name is a valid tenant id: 1 to 64 letters, digits, and `._@-`."""
    return _TENANT_ID.fullmatch(name) is not None


def time_text(seconds: int) -> str:
    """Formats a time for records, such as 2026-11-23T02:00:00Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def key_to_json(key: KeyRecord) -> dict[str, Any]:
    """The JSON value stored under the key's id. Fields that are None are omitted."""
    times = {name: getattr(key, name) for name in ("created", "expires", "revoked")}
    return {
        "tenant": key.tenant_id,
        "sha256": key.sha256,
        **{name: time_text(value) for name, value in times.items() if value is not None},
        **({} if key.models is None else {"models": list(key.models)}),
    }


def key_from_json(key_id: str, value: object) -> KeyRecord:
    """The inverse of `key_to_json`. Raises DamagedRecord."""
    where = f"key {key_id[:40]!r}"
    values = _object(where, value, {"tenant", "sha256", "created", "expires", "revoked", "models"})
    if _KEY_ID.fullmatch(key_id) is None:
        raise DamagedRecord(f"{where}: an id has 12 lower-case letters and digits")
    sha256, tenant_id = values.get("sha256"), values.get("tenant")
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        raise DamagedRecord(f"{where}: sha256 must be 64 hexadecimal digits")
    if not isinstance(tenant_id, str) or not is_tenant_id(tenant_id):
        raise DamagedRecord(f"{where}: tenant must be 1 to 64 letters, digits, and ._@-")
    created = _time(where, "created", values.get("created"))
    if created is None:
        raise DamagedRecord(f"{where}: created is missing")
    models = values.get("models")
    if models is not None and not _are_names(models):
        raise DamagedRecord(f"{where}: models must be a list of names")
    return KeyRecord(
        key_id,
        sha256,
        tenant_id,
        created,
        _time(where, "expires", values.get("expires")),
        _time(where, "revoked", values.get("revoked")),
        None if models is None else tuple(models),
    )


def tenant_to_json(tenant: TenantRecord) -> dict[str, Any]:
    """The JSON value stored under the tenant's id. Fields with default values are omitted."""
    return {
        field.name: value
        for field in fields(tenant)
        if field.default is not MISSING and (value := getattr(tenant, field.name)) != field.default
    }


def tenant_from_json(tenant_id: str, value: object) -> TenantRecord:
    """The inverse of `tenant_to_json`. Raises DamagedRecord."""
    where = f"tenant {tenant_id[:80]!r}"
    names = {field.name for field in fields(TenantRecord)} - {"tenant_id"}
    values = _object(where, value, names)
    if not is_tenant_id(tenant_id):
        raise DamagedRecord(f"{where}: a name has 1 to 64 letters, digits, and ._@-")
    record = TenantRecord(tenant_id, **values)
    if (complaint := why_wrong(record)) is not None:
        raise DamagedRecord(f"{where}: {complaint}")
    return record


def why_wrong(tenant: TenantRecord) -> str | None:
    """Returns a sentence about the record's first invalid number, or None if all are valid."""
    if isinstance(tenant.weight, bool) or not isinstance(tenant.weight, int | float):
        return "weight must be a number"
    if not 1 / MAX_WEIGHT <= tenant.weight <= MAX_WEIGHT:
        return f"weight must be from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
    share = tenant.max_retained_share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        return "max_retained_share must be a number above 0, at most 1"
    for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests"):
        limit = getattr(tenant, name)
        if limit is not None and not (_is_whole(limit) and 1 <= limit <= MAX_LIMIT):
            return f"{name} must be a whole number from 1 to {MAX_LIMIT}"
    ceiling = tenant.priority_ceiling
    if ceiling is not None and not (_is_whole(ceiling) and abs(ceiling) < 2**31):
        return "priority_ceiling must be a whole number of 32 bits"
    return None


def _object(where: str, value: object, names: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DamagedRecord(f"{where} is no JSON object")
    if unknown := value.keys() - names:
        raise DamagedRecord(f"{where} has no field {min(unknown)!r}")
    return value


def _time(where: str, name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise DamagedRecord(f"{where}: {name} must be a time such as 2026-11-23T02:00:00Z")
    return int(moment.timestamp())


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
