"""All routes of the option `vllm_routes`."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import BaseModel

from services.gateway.adapters.http.exchange.route import Route
from services.gateway.options.option import Option, Options, RouteParts
from services.gateway.options.vllm_routes.ranking import routes as ranking
from services.gateway.options.vllm_routes.tokens import routes as tokens


class VllmRoutes(Option):
    """Serves vLLM's routes that OpenAI's API does not have."""

    operations: ClassVar[Mapping[str, str]] = {**ranking.OPERATIONS, **tokens.OPERATIONS}
    bodies: ClassVar[Mapping[str, type[BaseModel]]] = {**ranking.BODIES, **tokens.BODIES}

    def routes(self, parts: RouteParts, options: Options) -> Sequence[Route]:  # noqa: ARG002
        labels = ranking.read_class_labels(parts.model)
        return (
            tokens.TokenRoutes(parts.generation).route(parts.generating_headers),
            *ranking.RankingRoutes(parts.generation, labels).routes(parts.headers),
            *tokens.RenderRoutes(parts.inference, parts.gate, parts.bodies).routes(),
        )
