"""Settings of clients' sessions."""

from dataclasses import dataclass

from services.common.process.settings import at_least, setting
from services.gateway.options.sessions.core.client_sessions import SessionLimits


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """The part of GatewaySettings that concerns clients' sessions."""

    max_client_sessions: int = setting(
        256,
        doc="open sessions of clients, an eighth of them per tenant; others get 503 (429 for the "
        "tenant)",
        check=at_least(0),
    )
    client_session_idle_seconds: float = setting(
        60.0, doc="time without a turn after which a client's session ends", check=at_least(0.1)
    )

    @property
    def session_limits(self) -> SessionLimits:
        return SessionLimits(
            self.max_client_sessions,
            -(-self.max_client_sessions // 8),
            self.client_session_idle_seconds,
        )
