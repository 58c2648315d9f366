"""The parts of the clients' servers that options use."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.adapters.grpc.call_records import CallRecords
from services.gateway.adapters.grpc.message_stream import AnswerStreams, Context
from services.gateway.adapters.http.clients.generation_routes import GenerationRoutes
from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.exchange.route import RequestHeader
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.core.gate import Gate
from services.gateway.core.request.inference import Inference


@dataclass(frozen=True, slots=True)
class RouteParts:
    """The parts of the clients' HTTP server that routes of options use."""

    generation: GenerationRoutes
    inference: Inference
    gate: Gate
    bodies: BodyReader
    model: Path
    """Path of the model's directory or file."""
    headers: tuple[RequestHeader, ...]
    """Headers that the gateway reads in requests that run the model."""
    generating_headers: tuple[RequestHeader, ...]
    """Headers that the gateway reads in requests that generate tokens."""


StreamCall = Callable[[AsyncIterator[Any], Context], Awaitable[None]]
"""Handles a gRPC call with a stream of requests, and writes the answers to the call's context."""


@dataclass(frozen=True, slots=True)
class CallParts:
    """The parts of the clients' gRPC server that calls of options use."""

    inference: Inference
    gate: Gate
    observer: Observer
    records: CallRecords
    streams: AnswerStreams
