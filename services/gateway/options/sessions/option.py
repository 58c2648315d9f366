"""The option that adds clients' sessions to the gateway."""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from services.common.errors import StepwellError
from services.common.process.settings import at_least, setting
from services.common.telemetry.metric_specs import by_label, single
from services.common.telemetry.metric_specs.spec import Source, Specs
from services.gateway.adapters.http.clients.generation_routes import COMPLETIONS
from services.gateway.adapters.http.exchange.route import Route
from services.gateway.options.option import (
    CallParts,
    Option,
    OptionParts,
    Options,
    RouteParts,
    StreamCall,
)
from services.gateway.options.sessions.calls import GENERATE_SESSION, SessionCalls
from services.gateway.options.sessions.core.client_sessions import ClientSessions, SessionLimits
from services.gateway.options.sessions.routes import SESSIONS, SessionBody, SessionRoutes, TurnBody

_specs = Specs(Source.GATEWAY)
OPEN_SESSIONS = _specs.gauge(
    "stepwell_gateway_sessions",
    "sessions",
    "Open sessions of clients: in a turn, kept by a replica between turns, or idle.",
    "model_name",
    "state",
)
EXPIRED = _specs.counter(
    "stepwell_gateway_sessions_expired",
    "sessions",
    "Sessions of clients that ended without a turn for too long.",
    "model_name",
)
SPECS = _specs.all


class SessionsCollector(Collector):
    """Makes the metrics of clients' sessions at each scrape."""

    def __init__(self, sessions: ClientSessions, model_name: str) -> None:
        self._sessions = sessions
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        sessions = list(self._sessions)
        num_in_turn = sum(session.is_in_turn for session in sessions)
        num_held = sum(session.held is not None for session in sessions)
        num_idle = len(sessions) - num_in_turn - num_held
        by_state = {"in_turn": num_in_turn, "held": num_held, "idle": num_idle}
        yield by_label(OPEN_SESSIONS, by_state, self._model)
        yield single(EXPIRED, self._sessions.num_expired, self._model)


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
    """Serves clients' sessions over HTTP and gRPC."""

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
