"""The routes /classify, /pooling and /rerank. /rerank has three paths."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import ASGIApp

from services.gateway.adapters.http.clients.generation_routes import GenerationRoutes
from services.gateway.adapters.http.exchange.route import RequestHeader, Route, computed_route
from services.gateway.options.vllm_routes.ranking import answers
from services.gateway.options.vllm_routes.ranking.bodies import (
    ClassifyBody,
    PoolingBody,
    RerankBody,
)
from services.gateway.options.vllm_routes.ranking.dialects import (
    ClassifyApi,
    PoolingDialect,
    RerankDialect,
    classify_request,
    pooling_request,
    rerank_request,
)

CLASSIFY = "/classify"
POOLING = "/pooling"
RERANK = "/rerank"
V1_RERANK, V2_RERANK = f"/v1{RERANK}", f"/v2{RERANK}"
OPERATIONS = {
    RERANK: RerankDialect.operation,
    V1_RERANK: RerankDialect.operation,
    V2_RERANK: RerankDialect.operation,
    CLASSIFY: ClassifyApi.operation,
    POOLING: PoolingDialect.operation,
}
"""Maps each path to the name of its operation in traces and metrics."""
BODIES: Mapping[str, type[BaseModel]] = {
    RERANK: RerankBody,
    CLASSIFY: ClassifyBody,
    POOLING: PoolingBody,
}


class RankingRoutes:
    def __init__(self, generation: GenerationRoutes, labels: Sequence[str]) -> None:
        """`labels` are the names of the model's classes, in order."""
        self._generation = generation
        self._classify_api = ClassifyApi(labels)

    async def rerank(self, request: Request) -> ASGIApp:
        """Ranks documents by their scores with a query."""
        return self._generation.reply(request, RerankBody, rerank_request, RerankDialect)

    async def v1_rerank(self, request: Request) -> ASGIApp:
        """The same as /rerank."""
        return await self.rerank(request)

    async def v2_rerank(self, request: Request) -> ASGIApp:
        """The same as /rerank."""
        return await self.rerank(request)

    async def classify(self, request: Request) -> ASGIApp:
        """Classifies texts."""
        return self._generation.reply(request, ClassifyBody, classify_request, self._classify_api)

    async def pooling(self, request: Request) -> ASGIApp:
        """Computes the vectors of texts, whatever the pooling task of the model."""
        return self._generation.reply(request, PoolingBody, pooling_request, PoolingDialect)

    def routes(self, headers: tuple[RequestHeader, ...]) -> Sequence[Route]:
        """Returns the routes. `headers` are the request headers that all routes read."""
        pooling = partial(computed_route, tag="pooling", headers=headers)
        return (
            pooling(RERANK, self.rerank, answers.Ranking, body=RerankBody),
            pooling(V1_RERANK, self.v1_rerank, answers.Ranking, body=RerankBody),
            pooling(V2_RERANK, self.v2_rerank, answers.Ranking, body=RerankBody),
            pooling(CLASSIFY, self.classify, answers.Classification, body=ClassifyBody),
            pooling(POOLING, self.pooling, answers.PoolingAnswer, body=PoolingBody),
        )


def read_class_labels(model: Path) -> tuple[str, ...]:
    """Returns the names of a model's classes in order, from `id2label` in config.json. The result
    is empty if the keys of `id2label` are not the consecutive numbers from 0.
    """
    try:
        named = json.loads((model / "config.json").read_bytes()).get("id2label") or {}
        labels = tuple(str(named[str(number)]) for number in range(len(named)))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return ()
    return labels
