"""Counts arriving requests. A request is called arriving while the gateway reads, tokenizes and
checks it, until its sequences (the prompt and one answer each) are queued for a replica.
"""

from collections import Counter
from types import TracebackType

from services.gateway.core.caller import Caller


class Arrival:
    """One arriving request. It is counted until `end` is called or the `with` block ends."""

    def __init__(self, counts: Counter[str], caller: Caller) -> None:
        self._counts = counts
        self._caller_id: str | None = caller.caller_id
        counts[caller.caller_id] += 1

    def end(self) -> None:
        """Stops counting the request. Must be called when its sequences are queued or the request
        is refused. Idempotent.
        """
        if self._caller_id is None:
            return
        self._counts[self._caller_id] -= 1
        if not self._counts[self._caller_id]:
            del self._counts[self._caller_id]
        self._caller_id = None

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
    """The number of arriving requests of each Caller (owner of an API key). Arriving requests count
    as waiting when the length of a caller's queue is checked. Otherwise all requests of a burst
    would pass the check before the first of them is queued.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def num(self, caller: Caller) -> int:
        return self._counts[caller.caller_id]

    def begin(self, caller: Caller) -> Arrival:
        """Counts a request of the caller until `end` of the returned Arrival is called."""
        return Arrival(self._counts, caller)
