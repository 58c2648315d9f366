"""Counts arriving requests. A request is arriving from its first check until its sequences are
queued. Meanwhile it is read, tokenized and checked.
"""

from collections import Counter
from types import TracebackType

from services.gateway.core.caller import Caller


class Arrival:
    """One arriving request. It is counted until `end` is called or its `with` block ends."""

    def __init__(self, counts: Counter[str], tenant: Caller) -> None:
        self._counts = counts
        self._tenant_id: str | None = tenant.tenant_id
        counts[tenant.tenant_id] += 1

    def end(self) -> None:
        """Stops counting the request. Call this when the request's sequences are queued or the
        request is refused. Idempotent.
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
    """The number of arriving requests of each tenant. Arriving requests count as waiting when the
    length of a tenant's queue is checked. Otherwise all requests of a burst would pass the check
    before the first of them is queued.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def num(self, tenant: Caller) -> int:
        return self._counts[tenant.tenant_id]

    def begin(self, tenant: Caller) -> Arrival:
        """Counts a request until `end` is called on the returned Arrival."""
        return Arrival(self._counts, tenant)
