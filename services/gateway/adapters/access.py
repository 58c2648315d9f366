"""Access to a server: maps the API key of a request to its caller."""

import contextlib
import hmac
from collections.abc import Mapping
from contextvars import ContextVar

from services.common.errors import Unauthenticated
from services.gateway.core.caller import ANYONE, Caller

_SCHEME = "bearer"

CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)
"""The caller of the gRPC call in the current task. For HTTP it is `request.state.caller`."""


class Access:
    """Accepts requests with a known API key. If no keys are configured, accepts every request. The
    option `tenants` has a subclass with further keys.
    """

    def __init__(self, keys: Mapping[str, Caller] | None = None) -> None:
        """`keys` maps each key to the caller of its requests."""
        self.set_keys(keys or {})
        self.needs_key = bool(self._callers)

    def set_keys(self, keys: Mapping[str, Caller]) -> None:
        """Replaces all keys. Whether requests need a key does not change."""
        self._callers = {form: caller for key, caller in keys.items() for form in _forms(key)}

    async def authenticate(self, authorization: str) -> Caller:
        """Returns the caller of a request. Raises Unauthenticated if `authorization` is not
        `Bearer` with a valid key. Raises Unavailable if the key cannot be looked up at the moment.

        `authorization` is the header's value with one character for each byte (ISO 8859-1). Keys
        are compared in constant time.
        """
        if not self.needs_key:
            return ANYONE
        caller = self._find(key_of(authorization))
        if caller is None:
            raise invalid_key()
        return caller

    def recognize(self, authorization: str) -> Caller | None:  # noqa: ARG002
        """Returns the caller if it is known without a look-up, and has no limits. Returns None if
        `authenticate` must determine the caller.
        """
        return None if self.needs_key else ANYONE

    def _find(self, key: str) -> Caller | None:
        given = bytes_of(key)
        matches = [one for form, one in self._callers.items() if hmac.compare_digest(given, form)]
        return matches[0] if matches else None


def authorization_of(headers: Mapping[str, str]) -> str:
    """Returns the value of the header `authorization`. If it is missing, makes a value from
    `x-api-key`, the header of Anthropic's clients. The keys of `headers` are lower-case names.
    """
    given = headers.get("authorization", "")
    key = headers.get("x-api-key", "")
    return f"Bearer {key}" if key and not given else given


def key_of(authorization: str) -> str:
    """Returns the key in `authorization`. Raises Unauthenticated unless the scheme is Bearer."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != _SCHEME:
        raise invalid_key()
    return key.strip()


def bytes_of(key: str) -> bytes:
    return key.encode("latin-1", errors="replace")


def invalid_key() -> Unauthenticated:
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
