"""API keys."""

import contextlib
import hmac
from collections.abc import Sequence

from services.common.errors import Unauthenticated

_SCHEME = "bearer"


class ApiKeys:
    """The keys of which a request must show one; without any, every request passes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [form for key in keys for form in _forms(key)]

    def check(self, authorization: str) -> None:
        """Raises Unauthenticated unless the header's value is `Bearer` and a key.

        `authorization` has a character for each byte that came (ISO 8859-1). All keys are compared
        in constant time.
        """
        if not self._keys:
            return
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1", errors="replace")
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != _SCHEME or not any(matches):
            raise Unauthenticated(
                "a valid API key is needed: Authorization: Bearer KEY", reason="INVALID_API_KEY"
            )


def _forms(key: str) -> set[bytes]:
    """The bytes by which clients send a key: in UTF-8, or in ISO 8859-1, as HTTP once defined."""
    forms = {key.encode("utf-8", errors="surrogateescape")}
    with contextlib.suppress(UnicodeEncodeError):
        forms.add(key.encode("latin-1"))
    return forms
