"""Clients' sessions: requests that stay open between turns. (A gateway's session is the stream on
which all requests of the gateway arrive.)

Between turns, a client's session keeps its blocks to save computation, and counts as a running
request. If the scheduler ends a session to free its blocks, the gateway sends the session's tokens
again as a new request at the next turn.
"""

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import Unavailable
from services.scheduler.adapters.gateways.gateway_session import GatewaySession
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.core.engine.engine_core import EngineCore
from services.scheduler.core.output import WaitReason
from services.scheduler.core.request import Request, RequestStatus

KEPT_SECONDS = 1.0
"""A session may be ended for other requests after it has waited this long for input."""
_HELD = (WaitReason.MAX_SEQS, WaitReason.NO_BLOCKS)
"""If other requests wait for one of these reasons, a session between turns may be ended."""


class ResumableSessions:
    """The clients' sessions of one replica."""

    def __init__(self, engine: EngineCore, sessions: Sessions, max_num_sessions: int) -> None:
        """If `max_num_sessions` sessions are open, a further session ends with its first turn."""
        self.num_given_up = 0
        """Number of sessions that were ended to free their resources for other requests."""
        self._engine = engine
        self._sessions = sessions
        self._max_num_sessions = max_num_sessions
        self._waits_since: dict[tuple[Request, int], float] = {}
        """Maps a session and its number of tokens to the time when it was first seen waiting."""

    @property
    def open(self) -> list[Request]:
        """All sessions, in a turn or between two turns."""
        return [request for request in self._engine.unfinished if request.resumable]

    @property
    def num_between_turns(self) -> int:
        """Number of sessions that wait for input."""
        return len(self._engine.scheduler.queues.between_turns)

    @property
    def has_room(self) -> bool:
        return len(self.open) < self._max_num_sessions

    def find(self, session: GatewaySession, message: scheduler_pb2.AddChunk) -> Request:
        """The session that the input in `message` continues. Raises Unavailable if the session does
        not wait for input, or if its number of tokens differs from the number that the gateway
        expects.
        """
        request = session.requests.get(message.handle)
        if request is None or request.status is not RequestStatus.WAITING_FOR_CHUNK:
            raise Unavailable(
                f"no session with handle {message.handle} waits for input", reason="NO_SESSION"
            )
        if request.num_tokens != message.num_tokens:
            raise Unavailable(
                f"the session has {request.num_tokens} tokens, not {message.num_tokens}",
                reason="OTHER_TOKENS",
            )
        return request

    def end(self, session: GatewaySession, handle: int) -> None:
        """Ends a session whose input was refused. The refusal is sent to the gateway separately."""
        request = session.requests.get(handle)
        if request is not None:
            self._sessions.disown(session, handle)
            self._engine.changes.abort([request])

    def end_all(self) -> None:
        """Ends all sessions. A session in a turn ends after the turn."""
        for request in self.open:
            self._engine.changes.add_chunk(request, None)

    def end_for_waiting(self, reason: WaitReason | None, now: float) -> None:
        """Ends one session if other requests wait for resources that sessions occupy. `reason` is
        the wait reason of these requests.

        If sessions wait for input, the longest waiting session is ended, once it has waited for
        KEPT_SECONDS. If no session waits for input and no request runs, sessions with input wait
        for each other's blocks. Then the session that was opened last is ended.
        """
        scheduler, since = self._engine.scheduler, self._waits_since
        between_turns = scheduler.queues.between_turns
        waiting = [(request, request.num_tokens) for request in between_turns]
        self._waits_since = {one: since.get(one, now) for one in waiting}
        if reason not in _HELD or self._engine.num_waiting == len(between_turns):
            return
        victim = next(iter(between_turns), None)
        if victim is not None:
            if now < self._waits_since[victim, victim.num_tokens] + KEPT_SECONDS:
                return
        elif not scheduler.running:
            victim = max(
                (request for request in scheduler.queues.kv_waiting if request.resumable),
                key=lambda request: request.key,
                default=None,
            )
        if victim is not None:
            self.num_given_up += 1
            error = Unavailable(
                "the session was ended here since other requests wait for what it holds",
                reason="SESSION_GIVEN_UP",
            )
            self._sessions.refuse(victim, error)
            self._engine.changes.abort([victim])
