"""Authentication: maps the API key of a request to its tenant."""

import contextlib
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar

from services.common.errors import Unauthenticated
from services.common.keys.api_keys import KeyState, key_id_of, time_text
from services.gateway.core.tenant import ANYONE, Tenant
from services.gateway.options.tenants.core.limits.tenant_limits import NO_LIMITS, Allowance
from services.gateway.options.tenants.keys.store import KeyStore, KnownKey

_SCHEME = "bearer"

CALL_TENANT: ContextVar[Tenant] = ContextVar("call_tenant", default=ANYONE)
"""The tenant of the gRPC call in the current task. For HTTP it is `request.state.tenant`."""


CALL_ALLOWANCE: ContextVar[Allowance] = ContextVar("call_allowance", default=NO_LIMITS)
"""The amounts that the call in the current task takes from its tenant's limits. For HTTP it is
`request.state.allowance`.
"""


class ApiKeys:
    """The accepted API keys. If there are none, every request is accepted.

    Each key of `plain` has its own tenant without limits, named `key-1`, `key-2` and so on. Other
    keys are in `store`.
    """

    def __init__(
        self,
        plain: Sequence[str],
        store: KeyStore | None = None,
        *,
        share_cache: bool = False,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        self._plain = {
            form: Tenant(name, cache_salt="" if share_cache else name)
            for name, key in ((f"key-{n}", key) for n, key in enumerate(plain, start=1))
            for form in _forms(key)
        }
        self._store = store
        self._unix_seconds = unix_seconds
        self.are_needed = bool(plain) or store is not None
        """Whether requests need a key."""

    async def authenticate(self, authorization: str) -> Tenant:
        """Returns the tenant of a request. Raises Unauthenticated if the header is not `Bearer`
        with a valid key. Raises Unavailable if the key cannot be looked up at the moment.

        `authorization` has one character for each byte of the header (ISO 8859-1). Keys are
        compared in constant time.
        """
        tenant = self.recognize(authorization)
        if tenant is not None:
            return tenant
        key = _key(authorization)
        assert self._store is not None
        return self._checked(await self._store.find(key_id_of(key) or ""), key)

    def recognize(self, authorization: str) -> Tenant | None:
        """Returns the tenant of a request whose key is in memory. Returns None if the key is not in
        memory. Raises Unauthenticated if the key is known to be invalid.
        """
        if not self.are_needed:
            return ANYONE
        key = _key(authorization)
        given = _bytes_of(key)
        matches = [t for plain, t in self._plain.items() if hmac.compare_digest(given, plain)]
        if matches:
            return matches[0]
        key_id = key_id_of(key)
        if self._store is None or key_id is None:
            raise _invalid()
        known = self._store.known(key_id)
        return None if known is None else self._checked(known, key)

    def _checked(self, known: KnownKey | None, key: str) -> Tenant:
        if known is None or not known.record.matches(_bytes_of(key)):
            raise _invalid()
        self._check_state(known)
        return known.tenant

    def _check_state(self, known: KnownKey) -> None:
        """Raises Unauthenticated if the key was revoked or has expired."""
        match known.record.state(self._unix_seconds()):
            case KeyState.REVOKED:
                raise Unauthenticated("this API key was revoked", reason="REVOKED_API_KEY")
            case KeyState.EXPIRED:
                expired = time_text(known.record.expires or 0)
                raise Unauthenticated(
                    f"this API key expired at {expired}", reason="EXPIRED_API_KEY"
                )


def authorization_of(headers: Mapping[str, str]) -> str:
    """Returns the value of the header `authorization`. If it is missing, makes a value from
    `x-api-key`, the header of Anthropic's clients. The keys of `headers` are lower-case names.
    """
    given = headers.get("authorization", "")
    key = headers.get("x-api-key", "")
    return f"Bearer {key}" if key and not given else given


def _key(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != _SCHEME:
        raise _invalid()
    return key.strip()


def _bytes_of(key: str) -> bytes:
    return key.encode("latin-1", errors="replace")


def _invalid() -> Unauthenticated:
    return Unauthenticated(
        "a valid API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY",
        reason="INVALID_API_KEY",
    )


def _forms(key: str) -> set[bytes]:
    """Returns a key in the encodings that clients use: UTF-8, and ISO 8859-1, HTTP's original
    encoding.
    """
    forms = {key.encode("utf-8", errors="surrogateescape")}
    with contextlib.suppress(UnicodeEncodeError):
        forms.add(key.encode("latin-1"))
    return forms
