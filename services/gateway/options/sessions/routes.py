"""Routes of clients' sessions, below /v1/sessions. A session is a prompt that grows turn by turn. A
turn is a completion with the session's id.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.exchange.route import READ, Route
from services.gateway.adapters.http.openai.bodies import SessionBody
from services.gateway.adapters.http.openapi import answers
from services.gateway.core.gate import Gate
from services.gateway.core.request.inference import Inference
from services.gateway.options.sessions.core.client_session import ClientSession
from services.gateway.options.sessions.core.client_sessions import ClientSessions

SESSIONS = "/v1/sessions"


class SessionRoutes:
    """Opens, shows and ends sessions. A tenant has access only to its own sessions."""

    def __init__(
        self, sessions: ClientSessions, inference: Inference, gate: Gate, bodies: BodyReader
    ) -> None:
        self._sessions = sessions
        self._inference = inference
        self._gate = gate
        self._bodies = bodies

    def routes(self) -> tuple[Route, ...]:
        """Returns the routes."""
        one = f"{SESSIONS}/{{session_id}}"
        return (
            Route(
                SESSIONS,
                self.open_session,
                answers.Session,
                ("POST",),
                tag="sessions",
                body=SessionBody,
                errors=(404,),
            ),
            Route(
                one,
                self.session,
                answers.Session,
                (*READ, "DELETE"),
                tag="sessions",
                errors=(404,),
            ),
        )

    async def open_session(self, request: Request) -> Response:
        """Opens a session: a prompt that grows turn by turn. A turn is a completion with the
        session's id.
        """
        with self._gate.enter():
            body = await self._bodies.read(request, SessionBody)
            tenant = request.state.tenant
            self._inference.check_model(body.model, tenant)
            return JSONResponse(self._document(self._sessions.open(tenant)))

    async def session(self, request: Request) -> Response:
        """Shows an open session. DELETE ends the session. A running turn continues to its end."""
        session = self._sessions.find(request.path_params["session_id"], request.state.tenant)
        if request.method == "DELETE":
            self._sessions.end(session)
        return JSONResponse(self._document(session))

    def _document(self, session: ClientSession) -> dict[str, Any]:
        return {
            "id": session.session_id,
            "object": "session",
            "created": session.created,
            "model": self._inference.model_name,
            "status": _status(session),
            "num_turns": session.num_turns,
            "num_tokens": len(session.token_ids),
            "is_held": session.held is not None,
            "idle_timeout_seconds": self._sessions.limits.idle_seconds,
        }


def _status(session: ClientSession) -> str:
    if session.ended is not None:
        return "ended"
    return "in_turn" if session.is_in_turn else "idle"
