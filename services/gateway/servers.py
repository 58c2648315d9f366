"""The servers of a gateway: HTTP and gRPC for clients, and HTTP for operators."""

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
from services.gateway.adapters.http.exchange.app import guarded, make_app
from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.openai.client_routes import HEADERS, client_routes
from services.gateway.adapters.http.openai.generation_routes import OPERATIONS as GENERATING
from services.gateway.adapters.http.openai.generation_routes import GenerationRoutes
from services.gateway.adapters.http.openai.tokenizer_routes import TokenizerRoutes
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
from services.gateway.options.server_parts import CallParts, RouteParts, StreamCall
from services.gateway.parts import Parts

SERVICE_NAME = "stepwell.gateway.v1.Inference"
_ADMIN_CONNECTIONS = 64
"""Limit on the number of open connections of operators."""
_OTHER_RPCS = 256
"""Number of concurrent calls, such as health checks, that are allowed in addition to generating
calls.
"""
_GRPC_IDLE_MILLISECONDS = 300_000
"""A gRPC connection without calls is closed after this number of milliseconds."""


def http_server(parts: Parts, max_connections: int) -> HttpServer:
    """Makes the HTTP server of the clients' API, for at most `max_connections` connections."""
    settings = parts.settings
    inference, gate, options = parts.inference, parts.gate, parts.options
    budget = BodyBudget(settings.max_buffered_body_bytes, settings.body_timeout_seconds)
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
    return HttpServer(counted, _connections(parts, max_connections, quick), parts.tls)


def admin_server(parts: Parts) -> HttpServer | None:
    """Makes the HTTP server for operators. Returns None if the settings have no address for it."""
    settings = parts.settings
    if settings.admin_address is None:
        return None
    administration = Administration(
        lambda: [parts.links[replica.address].admin for replica in parts.membership.replicas]
    )
    budget = BodyBudget(settings.max_buffered_body_bytes, settings.body_timeout_seconds)
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
        Access({settings.admin_key: ANYONE} if settings.admin_key else {}),
        checks=(refuse_web_pages,),
    )
    wrapped = parts.options.wrap(app, for_operators=True)
    hosts = HostNames(hosts_for(settings.admin_address, ()))
    outer = guarded(wrapped, hosts, (), parts.recorder, {})
    tls = None if is_on_this_machine(settings.admin_address) else parts.tls
    return HttpServer(outer, _connections(parts, _ADMIN_CONNECTIONS), tls)


def grpc_server(parts: Parts, max_connections: int) -> GrpcServer:
    """Makes the gRPC server of the clients' API, for at most `max_connections` connections."""
    settings, servicer = parts.settings, _inference_servicer(parts)
    max_streams = settings.max_concurrent_requests
    max_streams += sum(option.max_streams for option in parts.options)
    server = GrpcServer(
        max_concurrent_rpcs=max_streams + _OTHER_RPCS,
        options={
            "grpc.max_receive_message_length": settings.max_message_bytes,
            "grpc.max_allowed_incoming_connections": max_connections,
            # One connection may have all streams that the gateway allows.
            "grpc.max_concurrent_streams": max_streams,
            "grpc.max_connection_idle_ms": _GRPC_IDLE_MILLISECONDS,
            # Time limits for a connection's handshake, and for the client's acknowledgement of the
            # server's HTTP/2 settings.
            "grpc.server_handshake_timeout_ms": int(1000 * settings.receive_timeout_seconds),
            "grpc.http2.settings_timeout": int(1000 * settings.receive_timeout_seconds),
        },
        interceptors=(_request_interceptor(parts, servicer),),
        tls=parts.tls,
    )
    server.add(gateway_pb2_grpc.add_InferenceServicer_to_server, servicer, SERVICE_NAME)
    return server


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
