"""Authentication: from the key that a request shows to its tenant."""

import contextlib
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar

from services.common.errors import Unauthenticated
from services.common.keys.api_keys import KeyState, key_id_of, time_text
from services.gateway.adapters.keys.store import KeyStore, KnownKey
from services.gateway.core.limits.tenant_limits import NO_LIMITS, Allowance
from services.gateway.core.tenant import ANYONE, Tenant

_SCHEME = "bearer"

CALL_TENANT: ContextVar[Tenant] = ContextVar("call_tenant", default=ANYONE)
"""The tenant of the gRPC call that the present task serves. Over HTTP it is `request.state.tenant`.
"""


CALL_ALLOWANCE: ContextVar[Allowance] = ContextVar("call_allowance", default=NO_LIMITS)
"""What the call has taken of its tenant's limits. Over HTTP it is `request.state.allowance`."""


class ApiKeys:
    """The keys of which a request must show one; where there are none, every request passes.

    `plain` keys each have a tenant of their own, without limits: `key-1`, `key-2` and so on. Other
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
        """Whether requests must show a key."""

    async def authenticate(self, authorization: str) -> Tenant:
        """The tenant of a request. Raises Unauthenticated unless the header's value is `Bearer` and
        a key that is accepted now, and Unavailable while that cannot be said.

        `authorization` has a character for each byte that came (ISO 8859-1). Keys are compared in
        constant time.
        """
        tenant = self.recognize(authorization)
        if tenant is not None:
            return tenant
        key = _key(authorization)
        assert self._store is not None
        return self._checked(await self._store.find(key_id_of(key) or ""), key)

    def recognize(self, authorization: str) -> Tenant | None:
        """The tenant of a request whose key is in memory; None if it is not. Raises Unauthenticated
        as `authenticate` does.
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
        """Raises Unauthenticated for a key that is no longer accepted."""
        match known.record.state(self._unix_seconds()):
            case KeyState.REVOKED:
                raise Unauthenticated("this API key was revoked", reason="REVOKED_API_KEY")
            case KeyState.EXPIRED:
                expired = time_text(known.record.expires or 0)
                raise Unauthenticated(
                    f"this API key expired at {expired}", reason="EXPIRED_API_KEY"
                )


def authorization_of(headers: Mapping[str, str]) -> str:
    """What the headers of a request, by lower-case names, say of its key: the value of
    `authorization`, or one made of `x-api-key`, by which Anthropic's clients send keys.
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
    """The bytes by which clients send a key: in UTF-8, or in ISO 8859-1, as HTTP once defined."""
    forms = {key.encode("utf-8", errors="surrogateescape")}
    with contextlib.suppress(UnicodeEncodeError):
        forms.add(key.encode("latin-1"))
    return forms
