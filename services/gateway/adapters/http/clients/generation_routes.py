"""The routes that run the model: completions, chat completions, messages, responses, embeddings and
scores.
"""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from services.gateway.adapters.http.anthropic.bodies import MessagesBody
from services.gateway.adapters.http.anthropic.dialect import MessagesDialect
from services.gateway.adapters.http.anthropic.request import messages_request
from services.gateway.adapters.http.exchange.asking_body import AskingBody, StreamedBody
from services.gateway.adapters.http.exchange.deadline import deadline_of
from services.gateway.adapters.http.exchange.dialect import Api
from services.gateway.adapters.http.exchange.errors import MESSAGES
from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.exchange.program_fields import program_of
from services.gateway.adapters.http.exchange.reply import Exchange, GenerationReply, RequestHooks
from services.gateway.adapters.http.exchange.request_state import ARRIVAL
from services.gateway.adapters.http.openai.bodies import (
    ChatCompletionBody,
    CompletionBody,
    EmbeddingBody,
    PooledBody,
    ScoreBody,
)
from services.gateway.adapters.http.openai.chat import ChatDialect, chat_request
from services.gateway.adapters.http.openai.completions import CompletionDialect, completion_request
from services.gateway.adapters.http.openai.pooled import (
    EmbeddingDialect,
    ScoreDialect,
    embedding_request,
    score_request,
)
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.adapters.http.openai.responses.dialect import ResponsesDialect
from services.gateway.adapters.http.openai.responses.request import responses_request
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.gate import Gate
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest
from services.gateway.core.request.request_check import check_request_id

B = TypeVar("B", bound=AskingBody)

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
SCORE = "/score"
V1_SCORE = "/v1/score"
OPERATIONS = {
    COMPLETIONS: CompletionDialect.operation,
    CHAT_COMPLETIONS: ChatDialect.operation,
    MESSAGES: MessagesDialect.operation,
    RESPONSES: ResponsesDialect.operation,
    EMBEDDINGS: EmbeddingDialect.operation,
    SCORE: ScoreDialect.operation,
    V1_SCORE: ScoreDialect.operation,
}
"""Maps each path to its operation in traces and metrics, a name from OpenTelemetry's GenAI
conventions.
"""


@dataclass(eq=False)
class GenerationRoutes:
    """The handlers of the routes."""

    inference: Inference
    hooks: RequestHooks
    gate: Gate
    observer: Observer
    bodies: BodyReader
    keep_alive: float
    """A stream sends a keep-alive after this number of seconds without an event. 0 disables
    keep-alives.
    """

    async def completions(self, request: Request) -> ASGIApp:
        """Text completions."""
        return self.reply(request, CompletionBody, completion_request, CompletionDialect)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """Chat completions."""
        return self.reply(request, ChatCompletionBody, chat_request, ChatDialect)

    async def messages(self, request: Request) -> ASGIApp:
        """Anthropic's messages."""
        return self.reply(request, MessagesBody, messages_request, MessagesDialect)

    async def responses(self, request: Request) -> ASGIApp:
        """OpenAI's responses. They are not stored."""
        return self.reply(request, ResponsesBody, responses_request, ResponsesDialect)

    async def embeddings(self, request: Request) -> ASGIApp:
        """Embeddings: a vector for each text."""
        return self.reply(request, EmbeddingBody, embedding_request, EmbeddingDialect)

    async def score(self, request: Request) -> ASGIApp:
        """Scores of pairs of texts."""
        return self.reply(request, ScoreBody, score_request, ScoreDialect)

    async def v1_score(self, request: Request) -> ASGIApp:
        """The same as /score."""
        return await self.score(request)

    def reply(
        self,
        request: Request,
        body_type: type[B],
        to_request: Callable[[B, Inference, str], Awaitable[ClientRequest]],
        api: Api[B],
    ) -> ASGIApp:
        """Returns the ASGI application that answers a request with a body of type `body_type`. The
        body is read when the application runs.
        """

        is_pooled = issubclass(body_type, PooledBody)

        async def read(entered: ExitStack) -> Exchange:
            state = request.scope["state"]
            caller: Caller = state["caller"]
            record: RequestRecord = state["record"]
            deadline = deadline_of(record.headers, record.timeline.began)
            arrival = state.get(ARRIVAL)
            if arrival is None:
                needs_room = is_pooled or self.hooks.needs_room(record.headers, caller)
                arrival = self.inference.arriving(caller, deadline, needs_room=needs_room)
            entered.enter_context(arrival)
            body = await self.bodies.read(request, body_type)
            self.inference.check_model(body.model, caller)
            name = _request_id(api.id_prefix, body, record)
            program = program_of(body, record.headers) if isinstance(body, StreamedBody) else None

            async def client_request() -> ClientRequest:
                asked = await to_request(body, self.inference, name)
                if program is not None:
                    session_id = program.id or asked.session_id
                    asked = replace(asked, program=program, session_id=session_id)
                adapter = self.inference.adapters.find(body.model)
                if caller is ANYONE and adapter is None:
                    return asked
                return replace(asked, caller=caller, adapter=adapter)

            return Exchange(
                body=body,
                api=api,
                caller=caller,
                record=record,
                deadline=deadline,
                arrival=arrival,
                to_request=client_request,
            )

        return GenerationReply(
            read, self.inference, self.hooks, self.gate, self.observer, self.keep_alive
        )


def _request_id(prefix: str, body: AskingBody, record: RequestRecord) -> str:
    """Returns `prefix` and the request's id, which is the client's from the body or a header, or a
    new id.
    """
    if body.request_id is not None:
        check_request_id(body.request_id)
        record.rename(body.request_id)
    return f"{prefix}-{record.request_id}"
