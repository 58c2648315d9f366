"""The last replica of each session."""

from collections import OrderedDict

MAX_SESSIONS = 65_536


class SessionReplicas:
    """Maps recently used sessions to their last replicas."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._replicas: OrderedDict[str, str] = OrderedDict()
        self._max_sessions = max_sessions

    def remember(self, session_id: str, address: str) -> None:
        """Stores the replica of a session. Does nothing for an empty session id."""
        if not session_id:
            return
        self._replicas[session_id] = address
        self._replicas.move_to_end(session_id)
        if len(self._replicas) > self._max_sessions:
            self._replicas.popitem(last=False)

    def replica_of(self, session_id: str) -> str | None:
        """The address of the session's last replica; None if it is not known."""
        return self._replicas.get(session_id)
