"""The routes that generate: completions and chat completions."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response

from services.common import names
from services.gateway.adapters.http.bodies import ChatCompletionBody, CompletionBody, SamplingBody
from services.gateway.adapters.http.chat import ChatDialect, chat_request, in_chat_words
from services.gateway.adapters.http.completions import CompletionDialect, completion_request
from services.gateway.adapters.http.deadline import deadline_of
from services.gateway.adapters.http.dialect import Envelope
from services.gateway.adapters.http.parse import BodyReader
from services.gateway.adapters.http.reply import Exchange, GenerationReply
from services.gateway.adapters.http.token_text import TokenText
from services.gateway.adapters.observation import Observer
from services.gateway.core.gate import Gate
from services.gateway.core.inference import Inference
from services.gateway.core.request_id import check_request_id

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"


class GenerationRoutes:
    """POST /v1/completions and /v1/chat/completions."""

    def __init__(
        self, inference: Inference, gate: Gate, observer: Observer, bodies: BodyReader
    ) -> None:
        self._inference = inference
        self._gate = gate
        self._observer = observer
        self._bodies = bodies
        self._tokens = TokenText(inference.tokenizer)

    async def completions(self, request: Request) -> Response:
        """Text completions."""

        async def read() -> Exchange:
            deadline = deadline_of(request.headers)
            body = await self._body(request, CompletionBody)
            name = _request_id("cmpl", body, request)
            envelope = self._envelope(name, body)
            return Exchange(
                operation=names.GENAI_OPERATION_TEXT_COMPLETION,
                traceparent=request.headers.get("traceparent", ""),
                deadline=deadline,
                stream=bool(body.stream),
                to_request=lambda: completion_request(body, self._inference, name),
                to_dialect=lambda made: CompletionDialect(envelope, made, self._tokens),
            )

        return self._reply(read)

    async def chat_completions(self, request: Request) -> Response:
        """Chat completions."""

        async def read() -> Exchange:
            deadline = deadline_of(request.headers)
            body = await self._body(request, ChatCompletionBody)
            name = _request_id("chatcmpl", body, request)
            envelope = self._envelope(name, body)
            return Exchange(
                operation=names.GENAI_OPERATION_CHAT,
                traceparent=request.headers.get("traceparent", ""),
                deadline=deadline,
                stream=bool(body.stream),
                to_request=lambda: chat_request(body, self._inference, name),
                to_dialect=lambda made: ChatDialect(envelope, made, self._tokens),
                in_client_words=lambda error: in_chat_words(error, body),
            )

        return self._reply(read)

    async def _body(self, request: Request, model: type[Any]) -> Any:
        body = await self._bodies.read(request, model)
        self._inference.check_model(body.model)
        return body

    def _reply(self, read: Callable[[], Awaitable[Exchange]]) -> Response:
        return GenerationReply(read, self._inference, self._gate, self._observer)

    def _envelope(self, name: str, body: SamplingBody) -> Envelope:
        options = body.stream_options
        return Envelope(
            id=name,
            created=int(time.time()),
            model=self._inference.model_name,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            usage_in_every_chunk=bool(options and options.continuous_usage_stats),
            return_token_ids=bool(body.return_token_ids),
            return_prompt_logprobs=body.prompt_logprobs is not None,
        )


def _request_id(prefix: str, body: SamplingBody, request: Request) -> str:
    """The client's name for its request, from body or header, or a new one."""
    if body.request_id is not None:
        check_request_id(body.request_id)
        request.state.request_id = body.request_id
    return f"{prefix}-{request.state.request_id}"
