"""Joins vLLM's further routes to the gateway."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import BaseModel

from services.gateway.adapters.http.exchange.route import RequestHeader, Route
from services.gateway.options.option import Option, RouteParts
from services.gateway.options.vllm_routes.ranking import routes as ranking
from services.gateway.options.vllm_routes.ranking.routes import RankingRoutes, read_class_labels
from services.gateway.options.vllm_routes.tokens import routes as tokens
from services.gateway.options.vllm_routes.tokens.routes import RenderRoutes, TokenRoutes


class VllmRoutes(Option):
    """Serves vLLM's routes that OpenAI's API does not have."""

    operations = ranking.OPERATIONS | tokens.OPERATIONS
    bodies: ClassVar[Mapping[str, type[BaseModel]]] = {**ranking.BODIES, **tokens.BODIES}

    def routes(self, parts: RouteParts, headers: tuple[RequestHeader, ...]) -> Sequence[Route]:
        ranked = RankingRoutes(parts.generation, read_class_labels(parts.model))
        return (
            TokenRoutes(parts.generation).route(headers),
            *ranked.routes(parts.headers),
            *RenderRoutes(parts.inference, parts.gate, parts.bodies).routes(),
        )
