"""The sequences that wait because no replica accepts them, in order of arrival."""

from collections.abc import Callable, Iterator
from functools import partial

from services.gateway.core.ports import Clock, Timer
from services.gateway.core.request.inflight import Inflight


class WaitingQueue:
    """Keeps sequences until they are sent to a replica, for at most `timeout_seconds`.

    The timeout of a sequence starts with the first `add`, and restarts with the first `add` after
    the sequence lost its replica or was taken back from it. A refusal by a replica does not restart
    the timeout. When a sequence's retry time (`retry_seconds` after `add`) or timeout has passed,
    the sequence is removed from the queue, and `on_retry` or `on_expired` is called.
    """

    def __init__(
        self,
        timeout_seconds: float,
        clock: Clock,
        *,
        on_retry: Callable[[Inflight], None],
        on_expired: Callable[[Inflight], None],
    ) -> None:
        self._timeout = timeout_seconds
        self._clock = clock
        self._on_retry = on_retry
        self._on_expired = on_expired
        self._timers: dict[Inflight, Timer] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[Inflight]:
        """Iterates over a copy in order of arrival. The queue may change during the iteration."""
        return iter(sorted(self._timers, key=lambda inflight: inflight.number))

    def add(self, inflight: Inflight, retry_seconds: float | None = None) -> None:
        """Adds a sequence. If `retry_seconds` is None, `on_retry` is not called for it."""
        self.discard(inflight)
        now = self._clock.time()
        if inflight.wait_until is None:
            inflight.wait_until = now + self._timeout
        when = inflight.wait_until
        if retry_seconds is not None:
            when = min(when, now + retry_seconds)
        self._timers[inflight] = self._clock.call_at(when, partial(self._wake, inflight))

    def discard(self, inflight: Inflight) -> None:
        timer = self._timers.pop(inflight, None)
        if timer is not None:
            timer.cancel()

    def _wake(self, inflight: Inflight) -> None:
        self.discard(inflight)
        assert inflight.wait_until is not None
        if self._clock.time() >= inflight.wait_until:
            self._on_expired(inflight)
        else:
            self._on_retry(inflight)
