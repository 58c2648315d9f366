"""Counts requests that passed the first check and are not queued yet: they are being read,
tokenized and checked.
"""

from collections import Counter
from types import TracebackType

from services.gateway.core.tenant import Tenant


class Arrival:
    """One arriving request. It counts until `end`, or until the end of a `with` block."""

    def __init__(self, counts: Counter[str], tenant: Tenant) -> None:
        self._counts = counts
        self._tenant_id: str | None = tenant.tenant_id
        counts[tenant.tenant_id] += 1

    def end(self) -> None:
        """Ends the count, since the request's sequences were queued or it was
        refused. Idempotent.
        """
        if self._tenant_id is None:
            return
        self._counts[self._tenant_id] -= 1
        if not self._counts[self._tenant_id]:
            del self._counts[self._tenant_id]
        self._tenant_id = None

    def __enter__(self) -> "Arrival":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.end()


class Arrivals:
    """The number of arriving requests of each tenant. They count as waiting when a queue's length
    is checked. Otherwise all requests of a burst would pass the check before the first one is
    queued.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def num(self, tenant: Tenant) -> int:
        return self._counts[tenant.tenant_id]

    def begin(self, tenant: Tenant) -> Arrival:
        """Counts a request until `end` is called on the returned Arrival."""
        return Arrival(self._counts, tenant)
