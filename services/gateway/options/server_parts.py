"""The parts of the clients' servers that options use."""

from dataclasses import dataclass
from pathlib import Path

from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.exchange.route import RequestHeader
from services.gateway.adapters.http.openai.generation_routes import GenerationRoutes
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
    """The model's directory or file."""
    headers: tuple[RequestHeader, ...]
    """Headers of every request that a model computes."""
    generating_headers: tuple[RequestHeader, ...]
    """Headers of requests that generate tokens."""
