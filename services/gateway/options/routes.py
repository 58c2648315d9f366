"""The interface through which an option adds routes to the clients' HTTP API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.exchange.route import RequestHeader, Route
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


class OptionRoutes:
    """The routes of one option. A subclass overrides `routes`."""

    operations: ClassVar[Mapping[str, str]] = {}
    """Maps each path that a model computes to its operation in traces and metrics."""
    bodies: ClassVar[Mapping[str, type[BaseModel]]] = {}
    """Maps each path to its body, if the body is this option's own."""

    def __init__(self, parts: RouteParts) -> None:
        self._parts = parts

    def routes(self) -> Sequence[Route]:
        raise NotImplementedError
