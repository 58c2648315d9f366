"""The table of the routes for clients."""

from collections.abc import Sequence
from functools import partial

from services.common.request.program import MAX_PROGRAM_ID_BYTES
from services.common.telemetry.exposition import CONTENT_TYPE
from services.gateway.adapters.http.anthropic.bodies import CountTokensBody, MessagesBody
from services.gateway.adapters.http.clients import generation_routes
from services.gateway.adapters.http.clients.server_routes import METRICS, MODELS, ServerRoutes
from services.gateway.adapters.http.clients.tokenizer_routes import COUNT_TOKENS, TokenizerRoutes
from services.gateway.adapters.http.exchange import program_fields
from services.gateway.adapters.http.exchange.deadline import HEADER as TIMEOUT_HEADER
from services.gateway.adapters.http.exchange.deadline import MAX_SECONDS
from services.gateway.adapters.http.exchange.errors import MESSAGES
from services.gateway.adapters.http.exchange.route import (
    READ,
    RequestHeader,
    Route,
    body_route,
    computed_route,
)
from services.gateway.adapters.http.openai import bodies
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.adapters.http.openapi import (
    answers,
    messages_answers,
    responses_answers,
    server_answers,
)

HEADERS = (
    RequestHeader(
        TIMEOUT_HEADER,
        "Seconds after which the client no longer waits for the answer.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
    ),
    RequestHeader("traceparent", "W3C trace context.", {"type": "string"}),
    RequestHeader("tracestate", "W3C trace context.", {"type": "string"}),
    RequestHeader(
        "baggage", "W3C baggage. Its entries become attributes of the spans.", {"type": "string"}
    ),
)
"""Headers that clients may send with every request that runs the model."""

_ID = {"type": "string", "maxLength": MAX_PROGRAM_ID_BYTES}
_PROGRAM_HEADERS = (
    *(
        RequestHeader(
            name, "Id of the program (session of an agent) to which the request belongs.", _ID
        )
        for name in (*program_fields.SESSION_HEADERS, program_fields.CLAUDE_CODE_HEADER)
    ),
    RequestHeader(
        program_fields.AGENT_HEADER,
        "Id of the agent, within the session, that sends the request.",
        _ID,
    ),
    RequestHeader(
        program_fields.PARENT_AGENT_HEADER, "Id of the agent that started the sending agent.", _ID
    ),
    RequestHeader(
        program_fields.PARENT_HEADER, "Id of the program that started this program.", _ID
    ),
    RequestHeader(
        program_fields.FINAL_HEADER, "`true` in the program's last turn.", {"type": "string"}
    ),
)
"""Headers that clients may send with every request that generates text."""


def client_routes(
    generation: generation_routes.GenerationRoutes,
    tokenizer: TokenizerRoutes,
    server: ServerRoutes,
    further: Sequence[Route],
    headers: tuple[RequestHeader, ...],
    *,
    has_metrics: bool,
    has_tokenizer_info: bool,
) -> Sequence[Route]:
    """Returns all routes for clients. A route of `further` replaces another route with its path.
    `headers` are the headers of requests that generate text.
    """
    metrics = Route(METRICS, server.metrics, CONTENT_TYPE, needs_key=False, is_polled=True)
    info = Route(
        "/tokenizer_info", tokenizer.tokenizer_info, server_answers.TokenizerInfo, tag="tokenizer"
    )
    routes = (
        *_generating(generation, headers),
        *_pooling(generation),
        *_tokenizing(tokenizer),
        *((info,) if has_tokenizer_info else ()),
        *_about_the_server(server),
        *((metrics,) if has_metrics else ()),
        *further,
    )
    return tuple({route.path: route for route in routes}.values())


def _generating(
    generation: generation_routes.GenerationRoutes, headers: tuple[RequestHeader, ...]
) -> Sequence[Route]:
    headers = (*headers, *_PROGRAM_HEADERS)
    generating = partial(computed_route, tag="openai", headers=headers)
    return (
        generating(
            generation_routes.COMPLETIONS,
            generation.completions,
            answers.Completion,
            body=bodies.CompletionBody,
            events=answers.CompletionChunk,
            errors=(404, 409, 504),
        ),
        generating(
            generation_routes.CHAT_COMPLETIONS,
            generation.chat_completions,
            answers.ChatCompletion,
            body=bodies.ChatCompletionBody,
            events=answers.ChatCompletionChunk,
        ),
        generating(
            MESSAGES,
            generation.messages,
            messages_answers.AnthropicResponse,
            tag="anthropic",
            body=MessagesBody,
            events=messages_answers.AnthropicEvent,
            has_named_events=True,
            error=messages_answers.AnthropicError,
        ),
        generating(
            generation_routes.RESPONSES,
            generation.responses,
            responses_answers.ResponseObject,
            body=ResponsesBody,
            events=responses_answers.ResponseEvent,
            has_named_events=True,
        ),
    )


def _pooling(generation: generation_routes.GenerationRoutes) -> Sequence[Route]:
    pooling = partial(computed_route, tag="pooling", headers=HEADERS)
    embeddings, scores = answers.Embeddings, answers.Scores
    return (
        pooling(
            generation_routes.EMBEDDINGS,
            generation.embeddings,
            embeddings,
            tag="openai",
            body=bodies.EmbeddingBody,
        ),
        pooling(generation_routes.SCORE, generation.score, scores, body=bodies.ScoreBody),
        pooling(generation_routes.V1_SCORE, generation.v1_score, scores, body=bodies.ScoreBody),
    )


def _tokenizing(tokenizer: TokenizerRoutes) -> Sequence[Route]:
    tokenizing = partial(body_route, tag="tokenizer")
    return (
        tokenizing(
            "/tokenize", tokenizer.tokenize, server_answers.Tokens, body=bodies.TokenizeBody
        ),
        tokenizing(
            "/detokenize", tokenizer.detokenize, server_answers.Text, body=bodies.DetokenizeBody
        ),
        tokenizing(
            COUNT_TOKENS,
            tokenizer.count_tokens,
            messages_answers.TokenCount,
            tag="anthropic",
            body=CountTokensBody,
            error=messages_answers.AnthropicError,
        ),
    )


def _about_the_server(server: ServerRoutes) -> Sequence[Route]:
    """Returns the routes about the server. Routes that probes, monitors and routers call need no
    API key.
    """
    probe = partial(
        Route,
        answer=server_answers.Healthy,
        needs_key=False,
        is_polled=True,
        other_answers={503: server_answers.Unhealthy},
    )
    model, card = f"{MODELS}/{{name:path}}", server_answers.ModelCard
    return (
        Route(MODELS, server.models, server_answers.ModelList, tag="openai"),
        Route(model, server.model, card, tag="openai", errors=(404,)),
        Route("/status", server.status, server_answers.Status, is_polled=True),
        probe("/health", server.health),
        probe("/ping", server.ping, methods=(*READ, "POST")),
        Route("/version", server.version, server_answers.Version, needs_key=False, is_polled=True),
        Route("/load", server.load, server_answers.Load, needs_key=False, is_polled=True),
    )
