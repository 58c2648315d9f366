"""API keys."""

import hmac
from collections.abc import Sequence

from services.common.errors import Unauthenticated

_SCHEME = "bearer"


class ApiKeys:
    """The keys that are let in; without any, everybody is."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, authorization: str) -> None:
        """Raises Unauthenticated unless the header's value is `Bearer` and a key.

        All keys are compared in constant time.
        """
        if not self._keys:
            return
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode()
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != _SCHEME or not any(matches):
            raise Unauthenticated(
                "a valid API key is needed: Authorization: Bearer KEY", reason="INVALID_API_KEY"
            )
