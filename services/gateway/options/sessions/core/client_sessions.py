"""The clients' sessions (prompts that grow turn by turn) at this gateway. Their number and their
idle time are limited.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.common.errors import NotFound, QuotaExceeded, ResourceExhausted, StepwellError
from services.common.recent import Recent
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.ports import TIMER_SLACK_SECONDS, Clock, Timer
from services.gateway.options.sessions.core.client_session import ClientSession

MAX_ENDED = 4096
"""Limit on the number of ended sessions whose errors are stored, for requests that name them."""
EXPIRED = "SESSION_EXPIRED"


class TooManySessions(QuotaExceeded):
    """The caller has reached its limit on open sessions."""

    reason = "TOO_MANY_SESSIONS"


@dataclass(frozen=True, slots=True)
class SessionLimits:
    max_sessions: int
    max_sessions_per_caller: int
    idle_seconds: float
    """Seconds without a turn after which a session ends."""


class ClientSessions:
    """Opens sessions, finds them by id, and ends sessions that are idle for too long."""

    def __init__(
        self,
        clock: Clock,
        limits: SessionLimits,
        *,
        new_id: Callable[[], str],
        unix_seconds: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.num_expired = 0
        self._clock = clock
        self._new_id = new_id
        self._unix_seconds = unix_seconds
        self._sessions: dict[str, ClientSession] = {}
        self._timers: dict[str, Timer] = {}
        self._num_of_caller: Counter[str] = Counter()
        self._listeners: dict[str, Callable[[StepwellError], object]] = {}
        self._ended: Recent[str, tuple[str, StepwellError]] = Recent(MAX_ENDED)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(self._sessions.values())

    def open(
        self, caller: Caller, on_ended: Callable[[StepwellError], object] | None = None
    ) -> ClientSession:
        """Opens a session. `on_ended` is called with an error if the session expires or the gateway
        drains. Raises TooManySessions if the caller has too many sessions, and ResourceExhausted if
        the gateway has.
        """
        limits, num_own = self.limits, self._num_of_caller[caller.caller_id]
        if caller != ANYONE and num_own >= limits.max_sessions_per_caller:
            raise TooManySessions(
                f"{num_own} sessions of this tenant are open; end one of them first",
                tenant_id=caller.caller_id,
                quota="sessions",
            )
        if len(self._sessions) >= limits.max_sessions:
            raise ResourceExhausted(
                f"{limits.max_sessions} sessions are open, the most that this gateway keeps; try "
                "again later",
                reason="TOO_MANY_SESSIONS",
                retry_after_seconds=1.0,
            )
        session = ClientSession(self._new_id(), caller, int(self._unix_seconds()), self)
        self._sessions[session.session_id] = session
        self._num_of_caller[caller.caller_id] += 1
        if on_ended is not None:
            self._listeners[session.session_id] = on_ended
        self._watch(session)
        return session

    def find(self, session_id: str, caller: Caller) -> ClientSession:
        """Returns the caller's open session with this id. Raises the error that ended the session,
        or NotFound if the caller has no such session.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.caller.caller_id == caller.caller_id:
            return session
        caller_id, error = self._ended.get(session_id, ("", None))
        if error is not None and caller_id == caller.caller_id:
            raise error
        raise NotFound(
            f"there is no session {session_id[:100]!r} at this gateway",
            field="session",
            reason="SESSION_NOT_FOUND",
        )

    def end(self, session: ClientSession) -> None:
        """Ends a session at its client's request. A running turn continues. Idempotent."""
        self._end(
            session, NotFound(f"session {session.session_id} was ended", reason="SESSION_ENDED")
        )

    def end_all(self, error: StepwellError) -> None:
        for session in list(self._sessions.values()):
            self._end_and_tell(session, error)

    # Methods that sessions call.

    def turn_began(self, session: ClientSession) -> None:
        """Stops the session's idle timer."""
        if (timer := self._timers.pop(session.session_id, None)) is not None:
            timer.cancel()

    def turn_ended(self, session: ClientSession) -> None:
        """Starts the session's idle timer."""
        if session.ended is None:
            self._watch(session)

    def _watch(self, session: ClientSession) -> None:
        idle = self.limits.idle_seconds
        when = self._clock.time() + idle + TIMER_SLACK_SECONDS
        self._timers[session.session_id] = self._clock.call_at(when, lambda: self._expire(session))

    def _expire(self, session: ClientSession) -> None:
        self.num_expired += 1
        error = NotFound(
            f"session {session.session_id} has ended: no turn of it began for "
            f"{self.limits.idle_seconds:g} s",
            field="session",
            reason=EXPIRED,
        )
        self._end_and_tell(session, error)

    def _end_and_tell(self, session: ClientSession, error: StepwellError) -> None:
        listener = self._listeners.get(session.session_id)
        self._end(session, error)
        if listener is not None:
            listener(error)

    def _end(self, session: ClientSession, error: StepwellError) -> None:
        if session.ended is not None:
            return
        session.ended = error
        self.turn_began(session)
        del self._sessions[session.session_id]
        self._listeners.pop(session.session_id, None)
        self._num_of_caller -= Counter((session.caller.caller_id,))
        self._ended[session.session_id] = session.caller.caller_id, error
        session.release()
