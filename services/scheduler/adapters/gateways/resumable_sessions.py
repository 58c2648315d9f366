"""Clients' sessions: requests with several turns, which wait for input between two turns. (Unlike a
gateway's session, which is the gRPC stream on which all requests of a gateway arrive.)

Between turns, a client's session keeps its blocks to save computation, and counts as a running
request. If the scheduler ends a session to free its blocks, the gateway sends the session's tokens
again as a new request at the next turn.
"""

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import Unavailable
from services.scheduler.adapters.gateways.gateway_session import GatewaySession
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.workers.adapter_loader import AdapterLoader
from services.scheduler.core.engine.engine_core import EngineCore
from services.scheduler.core.output import WaitReason
from services.scheduler.core.request import Request, RequestStatus

KEPT_SECONDS = 1.0
"""A session may be ended for other requests after it has waited for input for this time."""
_HELD = (WaitReason.MAX_SEQS, WaitReason.NO_BLOCKS)
"""A session between two turns may be ended if other requests wait for one of these reasons."""


class ResumableSessions:
    """The clients' sessions of one replica."""

    def __init__(
        self,
        engine: EngineCore,
        sessions: Sessions,
        adapters: AdapterLoader,
        max_num_sessions: int,
    ) -> None:
        """If `max_num_sessions` sessions are open, a further session ends with its first turn."""
        self.num_given_up = 0
        """Number of sessions that were ended because other requests needed what they occupied."""
        self._engine = engine
        self._sessions = sessions
        self._adapters = adapters
        self._max_num_sessions = max_num_sessions
        self._waits_since: dict[tuple[Request, int], float] = {}
        """Maps a session and its number of tokens to the time at which its wait was first seen."""

    @property
    def open(self) -> list[Request]:
        return [request for request in self._engine.unfinished if request.resumable]

    @property
    def num_between_turns(self) -> int:
        return len(self._engine.scheduler.queues.between_turns)

    @property
    def has_room(self) -> bool:
        return len(self.open) < self._max_num_sessions

    def find(self, session: GatewaySession, message: scheduler_pb2.AddChunk) -> Request:
        """The session that the input in `message` continues. Raises Unavailable if the session does
        not wait for input, or has another number of tokens than the gateway expects.
        """
        request = session.requests.get(message.handle)
        if request is None or not self._waits(request):
            raise Unavailable(
                f"no client's session with handle {message.handle} waits for input here",
                reason="NO_SESSION",
            )
        if request.num_tokens != message.num_tokens:
            raise Unavailable(
                f"the client's session has {request.num_tokens} tokens here, but the gateway "
                f"expects {message.num_tokens}",
                reason="OTHER_TOKENS",
            )
        return request

    def end(self, session: GatewaySession, handle: int) -> None:
        """Ends a session whose input was refused. The caller reports the refusal to the gateway."""
        request = session.requests.get(handle)
        if request is not None:
            self._sessions.disown(session, handle)
            self._engine.changes.abort([request])

    def end_all(self) -> None:
        """Ends all sessions, each after its present turn. Sessions between two turns are refused,
        so that a gateway that has sent the next turn meanwhile sends it to another replica.
        """
        error = Unavailable("the scheduler is draining", reason="DRAINING")
        for request in self.open:
            if self._waits(request):
                self._refuse(request, error)
            else:
                self._engine.changes.add_chunk(request, None)

    def end_for_waiting(self, reason: WaitReason | None, now: float) -> None:
        """Ends one session if other requests wait for blocks or rows, as `reason` says, or for the
        slot of its adapter. Ends the session that has waited longest for input, if it has waited at
        least KEPT_SECONDS. If no session waits for input and no request runs, sessions wait for
        each other's blocks, and the session that was opened last is ended.
        """
        between_turns, since = self._engine.scheduler.queues.between_turns, self._waits_since
        waiting = [(request, request.num_tokens) for request in between_turns]
        self._waits_since = {one: since.get(one, now) for one in waiting}
        victim = self._victim(reason)
        if victim is None:
            return
        begun = self._waits_since.get((victim, victim.num_tokens))
        if begun is not None and now < begun + KEPT_SECONDS:
            return
        self.num_given_up += 1
        error = Unavailable(
            "the scheduler ended the client's session to free its blocks, its batch row or its "
            "adapter's slot for other requests",
            reason="SESSION_GIVEN_UP",
        )
        self._refuse(victim, error)

    def _waits(self, request: Request) -> bool:
        """Whether a session waits for input that has not arrived."""
        return (
            request.status is RequestStatus.WAITING_FOR_CHUNK
            and not self._engine.changes.has_chunk(request)
        )

    def _refuse(self, request: Request, error: Unavailable) -> None:
        self._sessions.refuse(request, error)
        self._engine.changes.abort([request])

    def _victim(self, reason: WaitReason | None) -> Request | None:
        scheduler = self._engine.scheduler
        between_turns = scheduler.queues.between_turns
        if self._adapters.lacks_slot:
            others = (one for one in self._engine.unfinished if one not in between_turns)
            used = {b"", *(one.adapter_digest for one in others)}
            if unused := [one for one in between_turns if one.adapter_digest not in used]:
                return unused[0]
        if reason not in _HELD or self._engine.num_waiting == len(between_turns):
            return None
        if between_turns or scheduler.running:
            return next(iter(between_turns), None)
        return max(
            (request for request in scheduler.queues.kv_waiting if request.resumable),
            key=lambda request: request.key,
            default=None,
        )
