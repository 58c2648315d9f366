"""Sequences that have no replica at present, in order of arrival."""

import asyncio
from collections.abc import Callable, Iterator

from services.gateway.adapters.inflight import Inflight


class WaitingQueue:
    """Holds sequences until a replica takes them, `timeout_seconds` at most.

    The time begins with the first `add` after the sequence was lost or taken back: a replica that
    refuses it in between does not make it longer. `on_retry` is called for a sequence whose retry
    time came, `on_expired` for one whose time is up; both have left the queue by then.
    """

    def __init__(
        self,
        timeout_seconds: float,
        *,
        on_retry: Callable[[Inflight], None],
        on_expired: Callable[[Inflight], None],
    ) -> None:
        self._timeout = timeout_seconds
        self._on_retry = on_retry
        self._on_expired = on_expired
        self._inflights: set[Inflight] = set()

    def __len__(self) -> int:
        return len(self._inflights)

    def __iter__(self) -> Iterator[Inflight]:
        """A copy, in order of arrival: the queue may change meanwhile."""
        return iter(sorted(self._inflights, key=lambda inflight: inflight.number))

    def add(self, inflight: Inflight, retry_seconds: float | None = None) -> None:
        """Lets a sequence wait; after `retry_seconds`, where given, it is tried again."""
        self.discard(inflight)
        loop = asyncio.get_running_loop()
        if inflight.wait_until is None:
            inflight.wait_until = loop.time() + self._timeout
        when = inflight.wait_until
        if retry_seconds is not None:
            when = min(when, loop.time() + retry_seconds)
        self._inflights.add(inflight)
        inflight.retry = loop.call_at(when, self._wake, inflight)

    def discard(self, inflight: Inflight) -> None:
        """Removes the sequence, if it is here, and cancels its timer."""
        self._inflights.discard(inflight)
        if inflight.retry is not None:
            inflight.retry.cancel()
            inflight.retry = None

    def _wake(self, inflight: Inflight) -> None:
        self.discard(inflight)
        assert inflight.wait_until is not None
        if asyncio.get_running_loop().time() >= inflight.wait_until:
            self._on_expired(inflight)
        else:
            self._on_retry(inflight)
