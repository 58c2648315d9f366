"""The HTTP routes of clients' sessions: /v1/sessions, and completions that are turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from services.common.errors import InvalidArgument
from services.gateway.adapters.http.clients.generation_routes import COMPLETIONS
from services.gateway.adapters.http.exchange.fields import Body
from services.gateway.adapters.http.exchange.route import READ, Route, body_route, computed_route
from services.gateway.adapters.http.openai.bodies import CompletionBody
from services.gateway.adapters.http.openai.completions import CompletionDialect, completion_request
from services.gateway.adapters.http.openapi import answers
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest
from services.gateway.options.option import Options, RouteParts
from services.gateway.options.sessions.core.client_session import ClientSession
from services.gateway.options.sessions.core.client_sessions import ClientSessions
from services.gateway.options.sessions.core.turn import turn_of

SESSIONS = "/v1/sessions"


class SessionBody(Body):
    """POST /v1/sessions."""

    model: str | None = None


class TurnBody(CompletionBody):
    """POST /v1/completions, with the id of the session in which the completion is a turn."""

    session: str | None = Field(default=None, min_length=1, max_length=128)


class Session(answers.Answer):
    """A session that is open or was just ended. If `is_held` is true, a replica keeps the KV blocks
    of the session for the next turn.
    """

    id: str
    object: Literal["session"]
    created: int
    model: str
    status: Literal["idle", "in_turn", "ended"]
    num_turns: int
    num_tokens: int
    is_held: bool
    idle_timeout_seconds: float


@dataclass(eq=False)
class SessionRoutes:
    """Opens, shows and ends a caller's own sessions, and runs their turns."""

    sessions: ClientSessions
    options: Options
    parts: RouteParts

    def routes(self) -> Sequence[Route]:
        return (
            computed_route(
                COMPLETIONS,
                self.completions,
                answers.Completion,
                tag="openai",
                body=TurnBody,
                events=answers.CompletionChunk,
                errors=(404, 409, 504),
                headers=self.parts.generating_headers,
            ),
            body_route(SESSIONS, self.open_session, Session, tag="sessions", body=SessionBody),
            Route(
                f"{SESSIONS}/{{session_id}}",
                self.session,
                Session,
                (*READ, "DELETE"),
                tag="sessions",
                errors=(404,),
            ),
        )

    async def completions(self, request: Request) -> ASGIApp:
        """Completes text. If `session` is given, the completion is a turn of this session."""

        async def to_request(body: TurnBody, inference: Inference, name: str) -> ClientRequest:
            if body.session is None:
                return await completion_request(body, inference, name)
            if (header := self.options.header_in(request.state.record.headers)) is not None:
                raise InvalidArgument(f"{header} cannot be given with session", field="session")
            session = self.sessions.find(body.session, request.state.caller)
            if session.token_ids and body.add_special_tokens is None:
                body = body.model_copy(update={"add_special_tokens": False})
            return turn_of(session, await completion_request(body, inference, name))

        return self.parts.generation.reply(request, TurnBody, to_request, CompletionDialect)

    async def open_session(self, request: Request) -> Response:
        """Opens a session: a prompt that grows turn by turn. Completions with its id are turns."""
        with self.parts.gate.enter():
            body = await self.parts.bodies.read(request, SessionBody)
            caller = request.state.caller
            self.parts.inference.check_model(body.model, caller)
            return JSONResponse(self._document(self.sessions.open(caller)))

    async def session(self, request: Request) -> Response:
        """Shows an open session. DELETE ends the session, but a running turn continues."""
        session = self.sessions.find(request.path_params["session_id"], request.state.caller)
        if request.method == "DELETE":
            self.sessions.end(session)
        return JSONResponse(self._document(session))

    def _document(self, session: ClientSession) -> dict[str, Any]:
        return {
            "id": session.session_id,
            "object": "session",
            "created": session.created,
            "model": self.parts.inference.model_name,
            "status": _status(session),
            "num_turns": session.num_turns,
            "num_tokens": len(session.token_ids),
            "is_held": session.held is not None,
            "idle_timeout_seconds": self.sessions.limits.idle_seconds,
        }


def _status(session: ClientSession) -> str:
    if session.ended is not None:
        return "ended"
    return "in_turn" if session.is_in_turn else "idle"
