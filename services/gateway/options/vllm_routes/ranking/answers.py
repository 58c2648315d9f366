"""The bodies of the answers of /rerank, /classify and /pooling, for OpenAPI documents."""

from typing import Literal

from services.gateway.adapters.http.openapi.answers import (
    Answer,
    GeneratedAnswer,
    RequestMetrics,
    Usage,
)


class RankedText(Answer):
    """A document as the client sent it."""

    text: str


class Ranked(Answer):
    """A document's index in the request, and the document's score with the query."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(Answer):
    """An answer of /rerank: the documents in descending order of their scores."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage
    metrics: RequestMetrics | None = None


class Classified(Answer):
    """The probability of each class for one input, and the name of the most probable class."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Classification(GeneratedAnswer):
    """An answer of /classify."""

    object: Literal["list"]
    data: list[Classified]
    usage: Usage


class Pooled(Answer):
    """The vector of one input: a list of numbers, or little-endian float32 numbers in base64."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingAnswer(GeneratedAnswer):
    """An answer of /pooling."""

    object: Literal["list"]
    data: list[Pooled]
    usage: Usage
