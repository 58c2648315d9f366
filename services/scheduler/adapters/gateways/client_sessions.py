"""Sessions of clients: requests that stay open between turns, and what they may hold meanwhile.

Not to be confused with the sessions of gateways, through which all requests come. What a client's
session keeps here, blocks and a place, only saves computation: a gateway whose session has ended
here sends its tokens again, as a new request.
"""

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import Unavailable
from services.scheduler.adapters.gateways.sessions import GatewaySession, Sessions
from services.scheduler.core.engine.engine_core import EngineCore
from services.scheduler.core.output import WaitReason
from services.scheduler.core.request import Request, RequestStatus

KEPT_SECONDS = 1.0
"""How long a session waits for input before it may be ended for others."""
_HELD = (WaitReason.MAX_SEQS, WaitReason.NO_BLOCKS)
"""Wait reasons of requests for which a session between turns may be ended."""


class ClientSessions:
    """The sessions of one replica."""

    def __init__(self, engine: EngineCore, sessions: Sessions, max_num_sessions: int) -> None:
        """Sessions beyond `max_num_sessions` end with their turn."""
        self.num_given_up = 0
        """Sessions that were ended since other requests lacked what they held."""
        self._engine = engine
        self._sessions = sessions
        self._max_num_sessions = max_num_sessions
        self._waits_since: dict[tuple[Request, int], float] = {}
        """When sessions between turns were first seen so, by their tokens."""

    @property
    def open(self) -> list[Request]:
        """The sessions that are in a turn, or between two."""
        return [request for request in self._engine.unfinished if request.resumable]

    @property
    def num_between_turns(self) -> int:
        """How many wait for input."""
        return len(self._engine.scheduler.queues.between_turns)

    @property
    def has_room(self) -> bool:
        """Whether a further one may stay open."""
        return len(self.open) < self._max_num_sessions

    def find(self, session: GatewaySession, message: scheduler_pb2.AddChunk) -> Request:
        """The session that a chunk goes on with. Raises Unavailable unless it waits for input,
        after the tokens that the gateway expects.
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
        """Ends a session whose gateway is told that its input was refused."""
        request = session.requests.get(handle)
        if request is not None:
            self._sessions.disown(session, handle)
            self._engine.abort([request])

    def end_all(self) -> None:
        """Ends those between two turns, and the others after their turn."""
        for request in self.open:
            self._engine.add_chunk(request, None)

    def end_for_waiting(self, reason: WaitReason | None, now: float) -> None:
        """Ends one session, if other requests wait for `reason`, and sessions that do not run hold
        what these lack: the one that has waited for input the longest, and not only just. If none
        does and nothing runs, sessions with input wait for each other's blocks, and the last one is
        ended.
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
                (request for request in scheduler.kv_waiting if request.resumable),
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
            self._engine.abort([victim])
