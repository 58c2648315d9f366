"""The servers of a gateway: HTTP and gRPC for clients, and HTTP for operators."""

from collections.abc import Sequence

from starlette.types import ASGIApp
from stepwell.gateway.v1 import gateway_pb2_grpc

from services.common.rpc.addresses import is_on_this_machine
from services.common.rpc.server import GrpcServer
from services.common.telemetry import names
from services.gateway.adapters.access import Access
from services.gateway.adapters.grpc.call_records import CallRecords
from services.gateway.adapters.grpc.inference_servicer import (
    EMBED,
    GENERATE,
    REQUEST_TYPES,
    STREAM_TYPES,
    InferenceServicer,
)
from services.gateway.adapters.grpc.message_stream import AnswerStreams
from services.gateway.adapters.grpc.request_interceptor import RequestInterceptor
from services.gateway.adapters.http.clients.client_routes import HEADERS, client_routes
from services.gateway.adapters.http.clients.generation_routes import OPERATIONS as GENERATING
from services.gateway.adapters.http.clients.generation_routes import GenerationRoutes
from services.gateway.adapters.http.clients.tokenizer_routes import TokenizerRoutes
from services.gateway.adapters.http.exchange.app import guarded, make_app
from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.operators.admin_routes import AdminRoutes, refuse_web_pages
from services.gateway.adapters.http.operators.lora_routes import LoraRoutes
from services.gateway.adapters.http.transport.body_budget import BodyBudget
from services.gateway.adapters.http.transport.connections import ConnectionLimits, Connections
from services.gateway.adapters.http.transport.early_refusals import EarlyRefusals
from services.gateway.adapters.http.transport.hosts import HostNames, hosts_for
from services.gateway.adapters.http.transport.http_counts import HttpCounts
from services.gateway.adapters.http.transport.quick_refusals import QuickRefusals
from services.gateway.adapters.http.transport.server import HttpServer
from services.gateway.core.caller import ANYONE
from services.gateway.core.fleet.administration import Administration
from services.gateway.models.grpc_by_model import GrpcByModel, ModelCalls
from services.gateway.models.http_by_model import HttpByModel, ModelApp
from services.gateway.options.option import CallParts, RouteParts, StreamCall
from services.gateway.parts import Parts
from services.gateway.settings import GatewaySettings

SERVICE_NAME = "stepwell.gateway.v1.Inference"
_ADMIN_CONNECTIONS = 64
"""Limit on the number of open connections of operators."""
_OTHER_RPCS = 256
"""Number of concurrent calls, such as health checks, that are allowed in addition to generating
calls.
"""
_GRPC_IDLE_MILLISECONDS = 300_000
"""A gRPC connection without calls is closed after this number of milliseconds."""


def http_server(models: Sequence[Parts], max_connections: int) -> HttpServer:
    """Makes the HTTP server of the clients' API, for at most `max_connections` connections."""
    first = models[0]
    budget = _body_budget(first)
    if len(models) == 1:
        app, quick = _client_app(first, budget)
        return HttpServer(app, _connections(first, max_connections, quick), first.tls)
    apps = [ModelApp(parts.inference, _client_app(parts, budget)[0]) for parts in models]
    by_model = HttpByModel(apps, first.options.access, budget, first.settings)
    return HttpServer(by_model, _connections(first, max_connections), first.tls)


def _body_budget(parts: Parts) -> BodyBudget:
    settings = parts.settings
    return BodyBudget(settings.max_buffered_body_bytes, settings.body_timeout_seconds)


def _client_app(parts: Parts, budget: BodyBudget) -> tuple[ASGIApp, QuickRefusals]:
    """Makes the clients' application of one model, and what refuses its requests early."""
    settings = parts.settings
    inference, gate, options = parts.inference, parts.gate, parts.options
    bodies = BodyReader(
        settings.max_body_bytes, settings.max_items_per_request, budget, settings.unknown_fields
    )
    generation = GenerationRoutes(
        inference, options, gate, parts.observer, bodies, settings.sse_keep_alive_interval
    )
    headers = (*HEADERS, *options.request_headers)
    route_parts = RouteParts(generation, inference, gate, bodies, settings.model, HEADERS, headers)
    routes = client_routes(
        generation,
        TokenizerRoutes(inference, parts.membership, gate, bodies),
        parts.server_routes,
        [route for option in options for route in option.routes(route_parts, options)],
        headers,
        has_metrics=settings.metrics_address is None,
        has_tokenizer_info=settings.enable_tokenizer_info_endpoint,
    )
    app = make_app(
        "Stepwell",
        "OpenAI's API with vLLM's common extras, and Anthropic's messages.",
        routes,
        options.access,
        answer_headers=options.answer_headers,
    )
    operations = dict(GENERATING)
    for option in parts.options:
        operations |= option.operations
    generating = tuple(operations)
    early = EarlyRefusals(app, generating, gate, inference, options, parts.observer)
    checked = options.guarded(early, generating)
    wrapped = options.wrap(checked, for_operators=False)
    hosts = HostNames(hosts_for(settings.http_address, settings.allowed_hosts))
    outer = guarded(
        wrapped,
        hosts,
        settings.allowed_origins,
        parts.recorder,
        operations,
        app,
        answer_headers=options.answer_headers,
    )
    counted = HttpCounts(outer, routes, parts.metrics)
    quick = QuickRefusals(
        operations,
        hosts,
        options.access,
        gate,
        inference,
        parts.observer,
        parts.recorder,
        parts.metrics,
        settings.max_body_bytes,
        options.header_names | {"origin"},
    )
    return counted, quick


def admin_server(models: Sequence[Parts]) -> HttpServer | None:
    """Makes the HTTP server for operators. Returns None if the settings have no address for it."""
    first, settings = models[0], models[0].settings
    if settings.admin_address is None:
        return None
    budget = _body_budget(first)
    apps = [
        ModelApp(parts.inference, _admin_app(parts, settings.admin_address, budget))
        for parts in models
    ]
    by_model = HttpByModel(apps, _operators(settings), budget, settings)
    app = apps[0].app if len(apps) == 1 else by_model
    tls = None if is_on_this_machine(settings.admin_address) else first.tls
    return HttpServer(app, _connections(first, _ADMIN_CONNECTIONS), tls)


def _operators(settings: GatewaySettings) -> Access:
    return Access({settings.admin_key: ANYONE} if settings.admin_key else {})


def _admin_app(parts: Parts, address: str, budget: BodyBudget) -> ASGIApp:
    settings = parts.settings
    administration = Administration(
        lambda: [parts.links[replica.address].admin for replica in parts.membership.replicas]
    )
    bodies = BodyReader(
        settings.max_body_bytes, settings.max_items_per_request, budget, settings.unknown_fields
    )
    app = make_app(
        "Stepwell's operators' calls",
        "What changes the replicas for all clients. It is served apart from the clients' API.",
        (
            *AdminRoutes(administration, parts.server_routes, settings).routes(),
            *LoraRoutes(
                parts.inference.adapters, administration, bodies, settings.lora_dir
            ).routes(),
            *(route for option in parts.options for route in option.operator_routes(parts.options)),
        ),
        _operators(settings),
        checks=(refuse_web_pages,),
    )
    wrapped = parts.options.wrap(app, for_operators=True)
    hosts = HostNames(hosts_for(address, ()))
    return guarded(wrapped, hosts, (), parts.recorder, {})


def grpc_server(models: Sequence[Parts], max_connections: int) -> GrpcServer:
    """Makes the gRPC server of the clients' API, for at most `max_connections` connections."""
    first, settings = models[0], models[0].settings
    calls = [_model_calls(parts) for parts in models]
    for one in calls:
        one.servicer.others = [other.servicer for other in calls if other is not one]
    max_streams = sum(
        parts.settings.max_concurrent_requests + sum(option.max_streams for option in parts.options)
        for parts in models
    )
    by_model = GrpcByModel(calls, first.options.access, settings.receive_timeout_seconds)
    server = GrpcServer(
        max_concurrent_rpcs=max_streams + _OTHER_RPCS,
        options={
            "grpc.max_receive_message_length": settings.max_message_bytes,
            "grpc.max_allowed_incoming_connections": max_connections,
            # A single connection may use all streams that the gateway allows in total.
            "grpc.max_concurrent_streams": max_streams,
            "grpc.max_connection_idle_ms": _GRPC_IDLE_MILLISECONDS,
            # Time limits for a connection's handshake, and for the client's acknowledgement of the
            # server's HTTP/2 settings.
            "grpc.server_handshake_timeout_ms": int(1000 * settings.receive_timeout_seconds),
            "grpc.http2.settings_timeout": int(1000 * settings.receive_timeout_seconds),
        },
        interceptors=(calls[0].interceptor if len(calls) == 1 else by_model,),
        tls=first.tls,
    )
    server.add(gateway_pb2_grpc.add_InferenceServicer_to_server, calls[0].servicer, SERVICE_NAME)
    return server


def _model_calls(parts: Parts) -> ModelCalls:
    servicer = _inference_servicer(parts)
    return ModelCalls(parts.inference, _request_interceptor(parts, servicer), servicer)


def _inference_servicer(parts: Parts) -> InferenceServicer:
    streams = AnswerStreams(
        parts.inference, parts.metrics, reader_timeout_seconds=parts.settings.reader_timeout_seconds
    )
    call_parts = CallParts(
        parts.inference, parts.gate, parts.observer, CallRecords(parts.recorder), streams
    )
    calls: dict[str, StreamCall] = {}
    for option in parts.options:
        calls |= option.calls(call_parts, parts.options)
    return InferenceServicer(
        parts.inference, parts.options, parts.membership, parts.gate, parts.observer, streams, calls
    )


def _request_interceptor(parts: Parts, servicer: InferenceServicer) -> RequestInterceptor:
    return RequestInterceptor(
        parts.options,
        REQUEST_TYPES,
        STREAM_TYPES,
        arriving={GENERATE: servicer.arriving, EMBED: servicer.arriving},
        operations={
            GENERATE: names.GENAI_OPERATION_TEXT_COMPLETION,
            EMBED: names.GENAI_OPERATION_EMBEDDINGS,
        },
        recorder=parts.recorder,
        max_items=parts.settings.max_items_per_request,
        message_timeout_seconds=parts.settings.receive_timeout_seconds,
    )


def _connections(
    parts: Parts, max_connections: int, quick_refusals: QuickRefusals | None = None
) -> Connections:
    settings = parts.settings
    limits = ConnectionLimits(
        max_connections,
        settings.max_body_bytes,
        settings.http_keep_alive_seconds,
        settings.receive_timeout_seconds,
        settings.body_timeout_seconds,
        settings.reader_timeout_seconds,
    )
    return Connections(limits, lambda: parts.metrics.reader_timed_out("http"), quick_refusals)
