"""The bodies of requests to rerank documents, and to classify and pool texts."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from services.common.errors import StepwellError
from services.gateway.adapters.http.exchange.asking_body import renamed
from services.gateway.adapters.http.exchange.fields import (
    HistoryBody,
    Int,
    Only,
    choice,
    text_or_object,
)
from services.gateway.adapters.http.openai.bodies import InputBody, PooledBody

_NO_TEXT_LIMITS = "send truncate_prompt_tokens"


class DocumentBody(HistoryBody):
    """A document that is sent as an object. Fields other than `text` are ignored."""

    text: str


Document = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[DocumentBody, Tag("<object>")],
    choice(text_or_object, "must be a string or an object with a text"),
]


class RerankBody(PooledBody):
    """POST /rerank, /v1/rerank and /v2/rerank, as Jina's and Cohere's clients send it."""

    query: str
    documents: Annotated[list[Document], Field(min_length=1, fail_fast=True)]
    top_n: Int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[Any, Only(0, 4096, why=_NO_TEXT_LIMITS)] = None
    max_tokens_per_query: Annotated[Any, Only(0, why=_NO_TEXT_LIMITS)] = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def in_client_words(self, error: StepwellError) -> StepwellError:
        return renamed(error, {"prompt": "documents"})


class ClassifyBody(InputBody):
    """POST /classify."""


class PoolingBody(InputBody):
    """POST /pooling: texts whose vectors the model computes, for any pooling task."""

    task: Literal["embed", "classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
