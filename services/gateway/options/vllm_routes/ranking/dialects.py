"""Converts bodies of /rerank, /classify and /pooling to requests, and vectors to answers."""

from collections.abc import Iterator, Sequence
from typing import Any

from services.common.errors import InvalidArgument
from services.common.request.pooling import PoolingParams, PoolingTask
from services.common.telemetry import names
from services.gateway.adapters.http.exchange.dialect import ConvertedRequest
from services.gateway.adapters.http.exchange.json_pieces import LongList
from services.gateway.adapters.http.openai import pooled
from services.gateway.adapters.http.openai.dialect import usage_body
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest
from services.gateway.core.request.vectors import numbers
from services.gateway.options.vllm_routes.ranking.bodies import (
    ClassifyBody,
    PoolingBody,
    RerankBody,
)


async def rerank_request(body: RerankBody, inference: Inference, request_id: str) -> ClientRequest:
    """Makes the request that computes each document's score with the query."""
    if body.top_n is not None and body.top_n < 0:
        raise InvalidArgument(f"top_n must be at least 0, not {body.top_n}", field="top_n")
    return await pooled.pair_request(
        body, inference, request_id, {"query": [body.query], "documents": body.texts}
    )


async def classify_request(
    body: ClassifyBody, inference: Inference, request_id: str
) -> ClientRequest:
    """Makes the request that computes the class probabilities of each input."""
    inference.check_pools(PoolingTask.CLASSIFY)
    params = PoolingParams(use_activation=body.use_activation)
    return await pooled.prompts_request(body, inference, request_id, params)


async def pooling_request(
    body: PoolingBody, inference: Inference, request_id: str
) -> ClientRequest:
    """Makes the request that computes the vector of each input."""
    inference.check_pools(None if body.task is None else PoolingTask(body.task))
    params = PoolingParams(dimensions=body.dimensions, use_activation=body.use_activation)
    return await pooled.prompts_request(body, inference, request_id, params)


class RerankDialect:
    """Writes the documents in descending order of their scores. Documents with equal scores keep
    the order of the request.
    """

    operation = names.GENAI_OPERATION_SCORE
    id_prefix = "rerank"

    def __init__(self, converted: ConvertedRequest[RerankBody]) -> None:
        self._texts = converted.body.texts
        self._top_n = converted.body.top_n or len(self._texts)
        self._has_documents = converted.body.return_documents is not False
        self._head = {"id": converted.request.request_id, "model": converted.model_name}

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        scores = pooled.pair_scores(answers, len(self._texts))
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = (self._result(index, scores[index]) for index in order[: self._top_n])
        return {**self._head, "usage": usage_body(usage), "results": LongList(results, nested=True)}

    def _result(self, index: int, score: float) -> dict[str, Any]:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if self._has_documents:
            result["document"] = {"text": self._texts[index]}
        return result


class ClassifyDialect(pooled.ListDialect):
    """Writes each input's probabilities of the classes, and the name of its most probable class."""

    def __init__(self, converted: ConvertedRequest[ClassifyBody], labels: Sequence[str]) -> None:
        super().__init__(converted)
        self._labels = labels

    def items(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        for index, answer in enumerate(answers):
            probs = numbers(answer.pooled).tolist()
            best = max(range(len(probs)), key=probs.__getitem__)
            label = self._labels[best] if best < len(self._labels) else None
            yield {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}


class ClassifyApi:
    """Makes a ClassifyDialect with the names of the model's classes for each request."""

    operation = names.GENAI_OPERATION_SCORE
    id_prefix = "classify"

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels

    def __call__(self, converted: ConvertedRequest[ClassifyBody], /) -> ClassifyDialect:
        return ClassifyDialect(converted, self._labels)


class PoolingDialect(pooled.ListDialect):
    """Writes the vectors that the model computed."""

    operation = names.GENAI_OPERATION_EMBEDDINGS
    id_prefix = "pool"

    def __init__(self, converted: ConvertedRequest[PoolingBody]) -> None:
        super().__init__(converted)
        self._in_base64 = converted.body.encoding_format == "base64"

    def items(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        for index, answer in enumerate(answers):
            vector = pooled.vector_body(answer.pooled, in_base64=self._in_base64)
            yield {"index": index, "object": "pooling", "data": vector}
