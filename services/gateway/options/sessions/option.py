"""The option that adds clients' sessions to the gateway."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from prometheus_client.registry import Collector
from pydantic import BaseModel

from services.common.errors import StepwellError
from services.gateway.adapters.http.exchange.route import Route
from services.gateway.adapters.http.openai.generation_routes import COMPLETIONS
from services.gateway.options.option import Option, OptionParts, Options
from services.gateway.options.server_parts import CallParts, RouteParts, StreamCall
from services.gateway.options.sessions.calls import GENERATE_SESSION, SessionCalls
from services.gateway.options.sessions.core.client_sessions import ClientSessions
from services.gateway.options.sessions.metrics import SPECS, SessionsCollector
from services.gateway.options.sessions.routes import SESSIONS, SessionBody, SessionRoutes, TurnBody
from services.gateway.options.sessions.settings import SessionSettings


class Sessions(Option):
    """Keeps prompts that grow turn by turn, over HTTP and gRPC."""

    metric_specs = SPECS
    bodies: ClassVar[Mapping[str, type[BaseModel]]] = {COMPLETIONS: TurnBody, SESSIONS: SessionBody}

    def __init__(self, settings: SessionSettings, parts: OptionParts) -> None:
        self.sessions = ClientSessions(
            parts.clock,
            settings.session_limits,
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
