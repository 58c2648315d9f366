"""Which replica served each session last."""

from collections import OrderedDict

MAX_SESSIONS = 65_536


class SessionReplicas:
    """The replicas of the sessions that were seen last."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._replicas: OrderedDict[str, str] = OrderedDict()
        self._max_sessions = max_sessions

    def remember(self, session_id: str, address: str) -> None:
        """A sequence of the session is sent there. Does nothing for the empty session."""
        if not session_id:
            return
        self._replicas[session_id] = address
        self._replicas.move_to_end(session_id)
        if len(self._replicas) > self._max_sessions:
            self._replicas.popitem(last=False)

    def replica_of(self, session_id: str) -> str | None:
        """The address of the replica that served the session last; None if it is not known."""
        return self._replicas.get(session_id)
