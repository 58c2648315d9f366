"""The table of the routes for clients."""

from collections.abc import Sequence

from services.common.telemetry.exposition import CONTENT_TYPE
from services.gateway.adapters.http.anthropic.bodies import (
    SESSION_HEADER,
    CountTokensBody,
    MessagesBody,
)
from services.gateway.adapters.http.exchange.deadline import HEADER as TIMEOUT_HEADER
from services.gateway.adapters.http.exchange.deadline import MAX_SECONDS
from services.gateway.adapters.http.exchange.errors import MESSAGES
from services.gateway.adapters.http.exchange.route import READ, RequestHeader, Route
from services.gateway.adapters.http.openai.bodies import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ScoreBody,
    TokenizeBody,
)
from services.gateway.adapters.http.openai.generation_routes import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    SCORE,
    V1_SCORE,
    GenerationRoutes,
)
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.adapters.http.openai.tokenizer_routes import COUNT_TOKENS, TokenizerRoutes
from services.gateway.adapters.http.openapi import (
    answers,
    messages_answers,
    responses_answers,
    server_answers,
)
from services.gateway.adapters.http.operators.server_routes import METRICS, MODELS, ServerRoutes
from services.gateway.core.request.request_check import MAX_SESSION_ID_BYTES

HEADERS = (
    RequestHeader(
        TIMEOUT_HEADER,
        "Seconds after which the client gives up.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
    ),
    RequestHeader("traceparent", "W3C trace context.", {"type": "string"}),
    RequestHeader("tracestate", "W3C trace context.", {"type": "string"}),
    RequestHeader("baggage", "W3C baggage, which the spans show.", {"type": "string"}),
)
"""Headers of every request that a model computes."""

_SESSION_HEADER = RequestHeader(
    SESSION_HEADER,
    "Of which session of an agent a request is: they go to the same replica, while it has room.",
    {"type": "string", "maxLength": MAX_SESSION_ID_BYTES},
)


def client_routes(
    generation: GenerationRoutes,
    tokenizer: TokenizerRoutes,
    server: ServerRoutes,
    further: Sequence[Route],
    headers: tuple[RequestHeader, ...],
    *,
    has_metrics: bool,
    has_tokenizer_info: bool,
) -> Sequence[Route]:
    """Returns all routes for clients. `further` are the routes of options and displays. Each of
    them replaces a route with the same path. `headers` are those of requests that generate tokens.
    """
    routes = (
        *_generating(generation, headers),
        *_pooling(generation),
        *_tokenizing(tokenizer),
        *(_tokenizer_info(tokenizer) if has_tokenizer_info else ()),
        *_about_the_server(server),
        *((Route(METRICS, server.metrics, CONTENT_TYPE, needs_key=False),) if has_metrics else ()),
        *further,
    )
    return tuple({route.path: route for route in routes}.values())


def _generating(
    generation: GenerationRoutes, headers: tuple[RequestHeader, ...]
) -> Sequence[Route]:
    return (
        Route(
            COMPLETIONS,
            generation.completions,
            answers.Completion,
            ("POST",),
            tag="openai",
            body=CompletionBody,
            events=answers.CompletionChunk,
            errors=(404, 409, 504),
            headers=headers,
            is_limited=True,
        ),
        Route(
            CHAT_COMPLETIONS,
            generation.chat_completions,
            answers.ChatCompletion,
            ("POST",),
            tag="openai",
            body=ChatCompletionBody,
            events=answers.ChatCompletionChunk,
            errors=(404, 504),
            headers=headers,
            is_limited=True,
        ),
        Route(
            MESSAGES,
            generation.messages,
            messages_answers.AnthropicResponse,
            ("POST",),
            tag="anthropic",
            body=MessagesBody,
            events=messages_answers.AnthropicEvent,
            has_named_events=True,
            errors=(404, 504),
            error=messages_answers.AnthropicError,
            headers=(*headers, _SESSION_HEADER),
            is_limited=True,
        ),
        Route(
            RESPONSES,
            generation.responses,
            responses_answers.ResponseObject,
            ("POST",),
            tag="openai",
            body=ResponsesBody,
            events=responses_answers.ResponseEvent,
            has_named_events=True,
            errors=(404, 504),
            headers=headers,
            is_limited=True,
        ),
    )


def _pooling(generation: GenerationRoutes) -> Sequence[Route]:
    return (
        Route(
            EMBEDDINGS,
            generation.embeddings,
            answers.Embeddings,
            ("POST",),
            tag="openai",
            body=EmbeddingBody,
            errors=(404, 504),
            headers=HEADERS,
            is_limited=True,
        ),
        *(
            Route(
                path,
                handler,
                answers.Scores,
                ("POST",),
                tag="pooling",
                body=ScoreBody,
                errors=(404, 504),
                headers=HEADERS,
                is_limited=True,
            )
            for path, handler in ((SCORE, generation.score), (V1_SCORE, generation.v1_score))
        ),
    )


def _tokenizing(tokenizer: TokenizerRoutes) -> Sequence[Route]:
    return (
        Route(
            "/tokenize",
            tokenizer.tokenize,
            server_answers.Tokens,
            ("POST",),
            tag="tokenizer",
            body=TokenizeBody,
            errors=(404,),
        ),
        Route(
            "/detokenize",
            tokenizer.detokenize,
            server_answers.Text,
            ("POST",),
            tag="tokenizer",
            body=DetokenizeBody,
            errors=(404,),
        ),
        Route(
            COUNT_TOKENS,
            tokenizer.count_tokens,
            messages_answers.TokenCount,
            ("POST",),
            tag="anthropic",
            body=CountTokensBody,
            errors=(404,),
            error=messages_answers.AnthropicError,
        ),
    )


def _tokenizer_info(tokenizer: TokenizerRoutes) -> Sequence[Route]:
    handler = tokenizer.tokenizer_info
    return (Route("/tokenizer_info", handler, server_answers.TokenizerInfo, tag="tokenizer"),)


def _about_the_server(server: ServerRoutes) -> Sequence[Route]:
    """Returns the routes about the server. The routes that probes, monitors and routers call need
    no key.
    """
    return (
        Route(MODELS, server.models, server_answers.ModelList, tag="openai"),
        Route(
            f"{MODELS}/{{name:path}}",
            server.model,
            server_answers.ModelCard,
            tag="openai",
            errors=(404,),
        ),
        Route("/status", server.status, server_answers.Status),
        Route(
            "/health",
            server.health,
            server_answers.Healthy,
            needs_key=False,
            other_answers={503: server_answers.Unhealthy},
        ),
        Route(
            "/ping",
            server.ping,
            server_answers.Healthy,
            (*READ, "POST"),
            needs_key=False,
            other_answers={503: server_answers.Unhealthy},
        ),
        Route("/version", server.version, server_answers.Version, needs_key=False),
        Route("/load", server.load, server_answers.Load, needs_key=False),
    )
