"""The HTTP side of the gateway: its routes."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from services.common import metrics, names
from services.common.errors import InternalError, InvalidArgument, StepwellError
from services.gateway.adapters.auth import ApiKeys
from services.gateway.adapters.http.bodies import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
)
from services.gateway.adapters.http.chat import ChatDialect, chat_request, in_chat_words, render
from services.gateway.adapters.http.completions import CompletionDialect, completion_request
from services.gateway.adapters.http.deadline import deadline_of
from services.gateway.adapters.http.dialect import Envelope
from services.gateway.adapters.http.early_refusals import EarlyRefusals
from services.gateway.adapters.http.errors import error_response, plain_error_response
from services.gateway.adapters.http.hosts import HostCheck
from services.gateway.adapters.http.json_pieces import JsonReply, LongList
from services.gateway.adapters.http.openapi import describe_body
from services.gateway.adapters.http.parse import BodyLimits, read_body
from services.gateway.adapters.http.reply import Exchange, GenerationReply
from services.gateway.adapters.http.request_ids import HEADER as REQUEST_ID_HEADER
from services.gateway.adapters.http.request_ids import RequestIds
from services.gateway.adapters.metrics import Metrics
from services.gateway.adapters.observation import Observer
from services.gateway.adapters.scheduler_link import SchedulerLink
from services.gateway.adapters.status import replica_statuses
from services.gateway.core.fleet import Fleet
from services.gateway.core.gate import Gate
from services.gateway.core.inference import Inference
from services.gateway.core.request_id import check_request_id

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"


class HttpApi:
    """Routes and what they need. `app` is the ASGI application."""

    def __init__(
        self,
        inference: Inference,
        fleet: Fleet,
        links: Mapping[str, SchedulerLink],
        gate: Gate,
        observer: Observer,
        metrics: Metrics,
        keys: ApiKeys,
        *,
        body_limits: BodyLimits,
    ) -> None:
        self._inference = inference
        self._fleet = fleet
        self._links = links
        self._gate = gate
        self._observer = observer
        self._metrics = metrics
        self._keys = keys
        self._body_limits = body_limits
        self._created = int(time.time())
        self.app = EarlyRefusals(
            self._routes(), (COMPLETIONS, CHAT_COMPLETIONS), keys, gate, inference, observer
        )

    def _routes(self) -> FastAPI:
        app = FastAPI(
            title="Stepwell",
            description="OpenAI's API with vLLM's common extras.",
            # Requests have their own span; another one around it would tell less.
            telemetry={"tracing": False, "metrics": False, "logs": False},
        )
        locked = [Depends(self._authenticate)]
        with_body = [*locked, Depends(_check_content)]
        for path, handler, body in (
            (COMPLETIONS, self.completions, CompletionBody),
            (CHAT_COMPLETIONS, self.chat_completions, ChatCompletionBody),
            ("/tokenize", self.tokenize, TokenizeBody),
            ("/detokenize", self.detokenize, DetokenizeBody),
        ):
            extra = describe_body(body)
            app.add_api_route(
                path, handler, methods=["POST"], openapi_extra=extra, dependencies=with_body
            )
        reads: tuple[tuple[str, Callable[..., Awaitable[Response]], list[Any]], ...] = (
            ("/v1/models", self.models, locked),
            ("/v1/models/{name:path}", self.model, locked),
            ("/status", self.status, locked),
            ("/health", self.health, []),
            ("/metrics", self.metrics, []),
        )
        for path, read, keys in reads:
            app.add_api_route(path, read, methods=["GET"], dependencies=keys)
            app.add_api_route(
                path, read, methods=["HEAD"], dependencies=keys, include_in_schema=False
            )
        app.add_exception_handler(StepwellError, _stepwell_error)
        app.add_exception_handler(HTTPException, _http_exception)
        app.add_exception_handler(Exception, _defect)
        app.openapi()  # made now, since it takes longer than a request may
        return app

    async def _authenticate(self, request: Request) -> None:
        # A coroutine, since the framework would run a function in a thread of its own.
        self._keys.check(request.headers.get("authorization", ""))

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
                to_dialect=lambda made: CompletionDialect(envelope, made, self._inference.tokens),
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
                to_dialect=lambda made: ChatDialect(envelope, made, self._inference.tokens),
                in_client_words=lambda error: in_chat_words(error, body),
            )

        return self._reply(read)

    async def tokenize(self, request: Request) -> Response:
        """Text or a conversation to token ids."""
        with self._gate.enter():
            return await self._tokenize(await self._body(request, TokenizeBody))

    async def _tokenize(self, body: TokenizeBody) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgument("give either prompt or messages", field="prompt")
        _check_tokenize(body)
        is_text = body.prompt is not None
        text = body.prompt if body.prompt is not None else await render(body, self._inference)
        special = is_text if body.add_special_tokens is None else body.add_special_tokens
        token_name = self._inference.tokenizer.token_name
        token_ids = await self._inference.tokenize(text, add_special_tokens=special)
        names = (token_name(token) for token in token_ids) if body.return_token_strs else None
        return JsonReply(
            {
                "count": len(token_ids),
                "max_model_len": self._max_model_len(),
                "tokens": LongList(token_ids),
                "token_strs": None if names is None else LongList(names),
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Token ids to text."""
        with self._gate.enter():
            body = await self._body(request, DetokenizeBody)
            text = await self._inference.detokenize(body.tokens)
        return JSONResponse({"prompt": text})

    async def models(self) -> Response:
        """The models served here."""
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        """One model; without a name, all of them."""
        if not name:
            return await self.models()
        self._inference.check_model(name)
        return JSONResponse(self._model_card())

    async def status(self) -> Response:
        """Replicas, their queues and pools, as seen from here."""
        return JSONResponse(
            {
                "model": self._inference.model_name,
                "draining": not self._gate.is_open,
                "requests_in_flight": self._gate.inside,
                "sequences_without_replica": self._fleet.num_waiting,
                "replicas": await replica_statuses(
                    (replica, self._links[replica.address]) for replica in self._fleet.replicas
                ),
            }
        )

    async def health(self) -> Response:
        """200 when a replica can serve requests, with those that cannot; else 503 and why not."""
        reason = self._fleet.why_not_ready() if self._gate.is_open else "shutting down"
        if reason:
            return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ok", "not_ready": self._fleet.not_ready()})

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        self._metrics.replicas_ready.set(self._fleet.num_ready)
        return Response(self._metrics.render(), media_type=metrics.CONTENT_TYPE)

    async def _body(self, request: Request, model: type[Any]) -> Any:
        body = await read_body(request, model, self._body_limits)
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

    def _model_card(self) -> dict[str, Any]:
        name = self._inference.model_name
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "stepwell"}
        return {**card, "max_model_len": self._max_model_len()}

    def _max_model_len(self) -> int | None:
        """The model's context, as long as some replica tells it."""
        return self._fleet.limits().max_model_len if self._fleet.num_ready else None


def guarded(app: ASGIApp, names: Sequence[str], allowed_origins: Sequence[str]) -> ASGIApp:
    """The application behind the checks of where a request comes from, with names for requests."""
    if allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "Retry-After"),
        )
    return RequestIds(HostCheck(app, names))


def _request_id(prefix: str, body: SamplingBody, request: Request) -> str:
    """The client's name for its request, from body or header, or a new one."""
    if body.request_id is not None:
        check_request_id(body.request_id)
        request.state.request_id = body.request_id
    return f"{prefix}-{request.state.request_id}"


async def _check_content(request: Request) -> None:
    """Refuses bodies that are not said to be JSON.

    A page of another site may send any other kind without asking (a "simple" request); for JSON a
    browser asks first, and is told no unless the site is one of the allowed origins.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body must be sent with Content-Type: application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HTTPException(
            415, "the body must not be compressed", headers={"Accept-Encoding": "identity"}
        )


def _check_tokenize(body: TokenizeBody) -> None:
    if body.prompt is None:
        return
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise InvalidArgument(f"{name} may only be given with messages", field=name)


async def _stepwell_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StepwellError)
    return error_response(error)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = plain_error_response(error.status_code, message)
    response.headers.update(error.headers or {})
    return response


async def _defect(_request: Request, _error: Exception) -> Response:
    return error_response(InternalError("a defect here"))
