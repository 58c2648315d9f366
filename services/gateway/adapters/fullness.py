"""Whether a scheduler is known to refuse requests, so that they are refused before work on them."""

from math import inf

from services.common.errors import ResourceExhausted

# So often one more request is let through to a scheduler that refused the last one.
_RETRY_SECONDS = 0.25
# The refused request had lost that much of its time on the way, at most.
_ABOUT = 0.8


class Fullness:
    """What the last refusal of a scheduler says of the next request.

    It holds until the scheduler's queue moves, a quarter of a second at most, and for requests
    whose client waits about as long as the refused one's or less. Times are on one clock.
    """

    def __init__(self) -> None:
        self._error: ResourceExhausted | None = None
        self._patience = 0.0
        self._until = 0.0

    def refused(self, error: ResourceExhausted, deadline: float | None, now: float) -> None:
        """The scheduler refused a request that had this deadline."""
        patience = _patience(deadline, now)
        if self._error is not None and now < self._until and patience < self._patience:
            return  # says less than what is known
        self._error = error
        self._patience = patience
        self._until = now + _RETRY_SECONDS

    def room_again(self) -> None:
        """A request left the scheduler's queue, or the scheduler is another one."""
        self._error = None

    def would_refuse(self, deadline: float | None, now: float) -> ResourceExhausted | None:
        """The refusal that a request with this deadline would meet; None where it may be taken."""
        if self._error is None or now >= self._until:
            return None
        about = _ABOUT * _patience(deadline, now)
        return self._error if about <= self._patience else None


def _patience(deadline: float | None, now: float) -> float:
    return inf if deadline is None else deadline - now
