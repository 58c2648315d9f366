"""The route /inference/v1/generate, and the routes /render and /derender of text and chat
completions. The gateway answers requests to /render and /derender without a replica.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from services.common.errors import StepwellError
from services.gateway.adapters.http.clients.generation_routes import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    GenerationRoutes,
)
from services.gateway.adapters.http.exchange.json_pieces import JsonReply
from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.exchange.route import (
    RequestHeader,
    Route,
    body_route,
    computed_route,
)
from services.gateway.adapters.http.openai.bodies import ChatCompletionBody, CompletionBody
from services.gateway.adapters.http.openapi import answers as openai_answers
from services.gateway.core.gate import Gate
from services.gateway.core.request.inference import Inference
from services.gateway.options.vllm_routes.tokens import answers
from services.gateway.options.vllm_routes.tokens.bodies import GenerateTokensBody
from services.gateway.options.vllm_routes.tokens.derender import (
    derendered_chat,
    derendered_completion,
)
from services.gateway.options.vllm_routes.tokens.derender_bodies import (
    DerenderChatBody,
    DerenderCompletionBody,
)
from services.gateway.options.vllm_routes.tokens.dialect import TokensDialect, tokens_request
from services.gateway.options.vllm_routes.tokens.render import rendered_chat, rendered_completion

B = TypeVar("B", CompletionBody, ChatCompletionBody, DerenderChatBody, DerenderCompletionBody)

GENERATE_TOKENS = "/inference/v1/generate"
OPERATIONS = {GENERATE_TOKENS: TokensDialect.operation}
"""Maps the path to the name of its operation in traces and metrics."""
BODIES: Mapping[str, type[BaseModel]] = {
    GENERATE_TOKENS: GenerateTokensBody,
    f"{COMPLETIONS}/derender": DerenderCompletionBody,
    f"{CHAT_COMPLETIONS}/derender": DerenderChatBody,
}


class TokenRoutes:
    def __init__(self, generation: GenerationRoutes) -> None:
        self._generation = generation

    async def generate_tokens(self, request: Request) -> ASGIApp:
        """Generates tokens for a prompt of tokens."""
        return self._generation.reply(request, GenerateTokensBody, tokens_request, TokensDialect)

    def route(self, headers: tuple[RequestHeader, ...]) -> Route:
        return computed_route(
            GENERATE_TOKENS,
            self.generate_tokens,
            answers.GeneratedTokens,
            tag="tokens",
            body=GenerateTokensBody,
            events=answers.GeneratedTokensChunk,
            headers=headers,
        )


@dataclass(eq=False)
class RenderRoutes:
    inference: Inference
    gate: Gate
    bodies: BodyReader

    async def render_completion(self, request: Request) -> Response:
        """Converts each prompt of a text completion to a body for /inference/v1/generate."""
        return await self._answer(request, CompletionBody, rendered_completion)

    async def render_chat(self, request: Request) -> Response:
        """Converts a conversation to a body for /inference/v1/generate."""
        return await self._answer(request, ChatCompletionBody, rendered_chat)

    async def derender_completion(self, request: Request) -> Response:
        """Converts generated tokens to a text completion."""
        return await self._answer(request, DerenderCompletionBody, derendered_completion)

    async def derender_chat(self, request: Request) -> Response:
        """Converts generated tokens to a chat completion, with reasoning and tool calls."""
        return await self._answer(request, DerenderChatBody, derendered_chat)

    async def _answer(
        self, request: Request, kind: type[B], work: Callable[[B, Inference], Awaitable[Any]]
    ) -> Response:
        with self.gate.enter():
            body = await self.bodies.read(request, kind)
            self.inference.check_model(body.model, request.state.caller)
            try:
                return JsonReply(await work(body, self.inference))
            except StepwellError as error:
                if isinstance(body, CompletionBody | ChatCompletionBody):
                    raise body.in_client_words(error) from error
                raise

    def routes(self) -> Sequence[Route]:
        rendering = partial(body_route, tag="tokens")
        return (
            rendering(
                f"{COMPLETIONS}/render",
                self.render_completion,
                answers.Rendered,
                body=CompletionBody,
            ),
            rendering(
                f"{CHAT_COMPLETIONS}/render",
                self.render_chat,
                answers.RenderedPrompt,
                body=ChatCompletionBody,
            ),
            rendering(
                f"{COMPLETIONS}/derender",
                self.derender_completion,
                openai_answers.Completion,
                body=DerenderCompletionBody,
            ),
            rendering(
                f"{CHAT_COMPLETIONS}/derender",
                self.derender_chat,
                openai_answers.ChatCompletion,
                body=DerenderChatBody,
            ),
        )
