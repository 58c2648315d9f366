import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from prometheus_client.registry import Collector
from pydantic import BaseModel

from services.common.errors import StepwellError
from services.common.process.settings import at_least, setting
from services.gateway.adapters.http.exchange.route import Route
from services.gateway.adapters.http.openai.generation_routes import COMPLETIONS
from services.gateway.options.option import Option, OptionParts, Options
from services.gateway.options.server_parts import CallParts, RouteParts, StreamCall
from services.gateway.options.sessions.calls import GENERATE_SESSION, SessionCalls
from services.gateway.options.sessions.core.client_sessions import ClientSessions, SessionLimits
from services.gateway.options.sessions.metrics import SPECS, SessionsCollector
from services.gateway.options.sessions.routes import SESSIONS, SessionBody, SessionRoutes, TurnBody


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


class Sessions(Option):
    """Keeps prompts that grow turn by turn, over HTTP and gRPC."""

    metric_specs = SPECS
    bodies: ClassVar[Mapping[str, type[BaseModel]]] = {COMPLETIONS: TurnBody, SESSIONS: SessionBody}

    def __init__(self, settings: SessionSettings, parts: OptionParts) -> None:
        most, idle_seconds = settings.max_client_sessions, settings.client_session_idle_seconds
        self.sessions = ClientSessions(
            parts.clock,
            SessionLimits(most, -(-most // 8), idle_seconds),
            new_id=lambda: f"sess-{secrets.token_hex(16)}",
            unix_seconds=time.time,
        )
        self._model = parts.inference.model_name

    @property
    def collectors(self) -> Sequence[Collector]:
        return (SessionsCollector(self.sessions, self._model),)

    @property
    def max_streams(self) -> int:
        return self.sessions.limits.max_sessions

    def routes(self, parts: RouteParts, options: Options) -> Sequence[Route]:
        return SessionRoutes(self.sessions, options, parts).routes()

    def calls(self, parts: CallParts, options: Options) -> Mapping[str, StreamCall]:
        return {GENERATE_SESSION: SessionCalls(self.sessions, options, parts).serve}

    def begin_drain(self, error: StepwellError) -> None:
        self.sessions.end_all(error)
