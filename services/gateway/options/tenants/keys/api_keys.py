"""The API keys of tenants, from the settings and from a store of keys."""

import itertools
import time
from collections.abc import Sequence

from services.common.errors import Unauthenticated
from services.common.keys.api_keys import KeyState, key_id_of, time_text
from services.common.process.settings import FileItems
from services.gateway.adapters.access import Access, bytes_of, invalid_key, key_of
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.options.tenants.core.limits.rule import LimitSet
from services.gateway.options.tenants.core.tenant import Tenant
from services.gateway.options.tenants.keys.store import KeyStore, KnownKey


class ApiKeys(Access):
    """Accepts requests with an API key from `plain` or `store`. If there are neither keys in
    `plain` nor a store, accepts every request. But if `plain` is read from a file, which may get
    keys later, a request needs a key even while the file has none.

    Each key in `plain` has its own tenant without limits, named `key-1`, `key-2` and so on.
    """

    def __init__(
        self, plain: Sequence[str], store: KeyStore | None = None, *, share_cache: bool = False
    ) -> None:
        super().__init__()
        self._share_cache = share_cache
        self._numbers = itertools.count(1)
        self._plain: dict[str, Caller] = {}
        self.set_plain(plain)
        self._store = store
        self.needs_key = bool(plain) or isinstance(plain, FileItems) or store is not None

    def set_plain(self, plain: Sequence[str]) -> None:
        """Replaces the plain keys. A key that stays keeps its tenant. The number of a removed key's
        tenant is not used again, because traces and sessions of the tenant may still exist.
        """
        self._plain = {key: self._plain.get(key) or self._new_tenant() for key in plain}
        self.set_keys(self._plain)

    def _new_tenant(self) -> Tenant:
        name = f"key-{next(self._numbers)}"
        return Tenant(name, cache_salt="" if self._share_cache else name)

    async def authenticate(self, authorization: str) -> Caller:
        """Returns the caller of a request. A key that is not in memory is looked up in the
        store.
        """
        caller = self._known(authorization)
        if caller is not None:
            return caller
        key = key_of(authorization)
        assert self._store is not None
        return self._checked(await self._store.find(key_id_of(key) or ""), key)

    def recognize(self, authorization: str) -> Caller | None:
        """Returns the caller of a request if the key is in memory and its tenant has no limits,
        and otherwise None. Raises Unauthenticated if the key is known to be invalid.
        """
        caller = self._known(authorization)
        is_limited = isinstance(caller, Tenant) and not LimitSet.of(caller).is_empty
        return None if is_limited else caller

    def _known(self, authorization: str) -> Caller | None:
        """Returns the caller of a request, or None if the key is not in memory. Raises
        Unauthenticated if the key is known to be invalid.
        """
        if not self.needs_key:
            return ANYONE
        key = key_of(authorization)
        if (caller := self._find(key)) is not None:
            return caller
        key_id = key_id_of(key)
        if self._store is None or key_id is None:
            raise invalid_key()
        known = self._store.known(key_id)
        return None if known is None else self._checked(known, key)

    def _checked(self, known: KnownKey | None, key: str) -> Tenant:
        if known is None or not known.record.matches(bytes_of(key)):
            raise invalid_key()
        self._check_state(known)
        return known.tenant

    def _check_state(self, known: KnownKey) -> None:
        match known.record.state(time.time()):
            case KeyState.REVOKED:
                raise Unauthenticated("this API key was revoked", reason="REVOKED_API_KEY")
            case KeyState.EXPIRED:
                expired = time_text(known.record.expires or 0)
                raise Unauthenticated(
                    f"this API key expired at {expired}", reason="EXPIRED_API_KEY"
                )
