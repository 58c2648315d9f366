"""Leases, which ensure that a worker or a pool belongs to one scheduler at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from services.common.errors import FailedPrecondition


class Taken(FailedPrecondition):
    """The worker or pool belongs to another scheduler, which the message names."""

    reason = "TAKEN"


@dataclass(frozen=True, slots=True)
class Holder:
    """A scheduler process."""

    name: str
    """The name of the scheduler's replica."""
    started_unix_nanos: int

    def __str__(self) -> str:
        if not self.name:
            return "a scheduler without a name"
        started = datetime.fromtimestamp(self.started_unix_nanos / 1e9, UTC)
        return f"scheduler {self.name!r}, started at {started:%Y-%m-%d %H:%M:%S} UTC"


class Lease:
    """Grants a worker or a pool to one holder at a time. `what` names the worker or the pool in
    error messages.

    A lease lasts from `take` until `grace_seconds` after the last `release`, so that its holder can
    reopen a stream. A holder with the same name that started later takes over the lease at once,
    because it is the restarted scheduler. The connection of the old process may not have ended yet.
    After the takeover the old process is refused, even if its start time is later because the clock
    was set back. Leases are Gray and Cheriton's (1989). Each step has the pool's generation number,
    which increases when a holder opens the pool, so that steps of a replaced holder are rejected.
    """

    def __init__(self, what: str, grace_seconds: float, clock: Callable[[], float]) -> None:
        self._what = what
        self._grace_seconds = grace_seconds
        self._clock = clock
        self._holder: Holder | None = None
        self._former: Holder | None = None
        self._num_uses = 0
        self._free_at = 0.0

    def take(self, holder: Holder) -> None:
        """Grants the lease to `holder`. Raises Taken if the lease belongs to another holder."""
        if holder != self._holder:
            if not self._is_free() and not self._is_replaced_by(holder):
                raise Taken(f"the {self._what} is in use by {self._holder}")
            self._former, self._holder = self._holder, holder
            self._num_uses = 0
        self._num_uses += 1

    def release(self, holder: Holder) -> None:
        """Undoes one `take`. Does nothing if the lease now belongs to another holder."""
        if holder == self._holder:
            self._num_uses -= 1
            self._free_at = self._clock() + self._grace_seconds

    def _is_free(self) -> bool:
        return self._holder is None or (not self._num_uses and self._clock() >= self._free_at)

    def _is_replaced_by(self, holder: Holder) -> bool:
        before = self._holder
        return (
            before is not None
            and holder != self._former
            and holder.name == before.name
            and holder.started_unix_nanos > before.started_unix_nanos
        )
