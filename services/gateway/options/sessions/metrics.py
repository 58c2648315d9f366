from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import value_family
from services.common.telemetry.metric_specs.spec import Source, Specs
from services.gateway.options.sessions.core.client_sessions import ClientSessions

_specs = Specs(Source.GATEWAY)
SESSIONS = _specs.gauge(
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
    """Open client sessions at this gateway, read at each scrape."""

    def __init__(self, sessions: ClientSessions, model_name: str) -> None:
        self._sessions = sessions
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        sessions = list(self._sessions)
        num_in_turn = sum(session.is_in_turn for session in sessions)
        num_held = sum(session.held is not None for session in sessions)
        by_state = value_family(SESSIONS)
        by_state.add_metric([self._model, "in_turn"], num_in_turn)
        by_state.add_metric([self._model, "held"], num_held)
        by_state.add_metric([self._model, "idle"], len(sessions) - num_in_turn - num_held)
        yield by_state
        expired = value_family(EXPIRED)
        expired.add_metric([self._model], self._sessions.num_expired)
        yield expired
