"""The bodies of answers to rerank, classify and pooling, for OpenAPI documents."""

from typing import Literal

from services.gateway.adapters.http.openapi.answers import Answer, RequestMetrics, Usage


class RankedText(Answer):
    """A document as it was sent."""

    text: str


class Ranked(Answer):
    """A document's index in the request, and its score with the query."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(Answer):
    """An answer of /rerank: documents, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage
    metrics: RequestMetrics | None = None


class Classified(Answer):
    """The classes of one input: the probability of each, and the name of the most probable."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Classification(Answer):
    """An answer of /classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: Usage
    metrics: RequestMetrics | None = None


class Pooled(Answer):
    """The vector of one input: numbers, or their little-endian float32 in base64."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingAnswer(Answer):
    """An answer of /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: Usage
    metrics: RequestMetrics | None = None
