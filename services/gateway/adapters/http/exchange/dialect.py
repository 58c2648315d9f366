"""The interface of dialects, the objects that write answers in an API's schema."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from services.common.errors import StepwellError
from services.gateway.adapters.http.exchange.asking_body import AskingBody
from services.gateway.adapters.http.exchange.errors import error_body
from services.gateway.adapters.http.exchange.json_pieces import to_json
from services.gateway.core.ports import Tokenizer
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.request.request import ClientRequest

B_co = TypeVar("B_co", bound=AskingBody, covariant=True)
B_contra = TypeVar("B_contra", bound=AskingBody, contravariant=True)


@dataclass(frozen=True, slots=True)
class ConvertedRequest(Generic[B_co]):
    """A body, and the request to which it was converted, from which a dialect is made."""

    body: B_co
    request: ClientRequest
    arrival_unix_nanos: int
    model_name: str
    tokenizer: Tokenizer

    @property
    def created(self) -> int:
        """The request's arrival in seconds since 1970."""
        return self.arrival_unix_nanos // 10**9


class WholeDialect(Protocol):
    """Writes the answers of an API that never streams."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Returns the body of an answer."""


class Api(Protocol[B_contra]):
    """The class of an API's dialect."""

    operation: str
    """The name of the operation in traces and metrics, from OpenTelemetry's GenAI conventions."""
    id_prefix: str

    def __call__(
        self, converted: ConvertedRequest[B_contra], /
    ) -> "StreamingDialect | WholeDialect": ...


class StreamingDialect(ABC):
    """Writes the answers of one request in one API's schema, whole or streamed."""

    operation: str
    id_prefix: str
    keep_alive = b": keep-alive\n\n"
    """A comment of the event stream. Clients ignore it."""

    @abstractmethod
    def opening(self, usage: Usage) -> list[dict[str, Any]]:
        """Returns the chunks before the first token. `usage` has the token counts of the prompt."""

    @abstractmethod
    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks for one piece of an answer. There may be none."""

    @abstractmethod
    def encode_chunks(
        self, chunks: Sequence[dict[str, Any]], usage: Callable[[], Usage]
    ) -> Iterator[bytes]:
        """Encodes the results of `opening` and `chunks` as server-sent events. Calls `usage` only
        if the events contain token counts.
        """

    def text_event(self, _piece: Piece) -> bytes | None:
        """Encodes a piece quickly if its chunk differs from the previous chunk only in text and
        token ids. Otherwise returns None, and `chunks` must write the piece.
        """
        return None

    @abstractmethod
    def closing(self, usage: Usage, metrics: dict[str, Any] | None) -> bytes:
        """Returns the last events of a complete answer."""

    @staticmethod
    def refused(error: StepwellError) -> bytes:
        """Returns the last events of an answer that an error ended before `opening`."""
        return event(error_body(error)) + b"data: [DONE]\n\n"

    def broken_off(self, error: StepwellError) -> bytes:
        """Returns the last events of an answer that an error ended."""
        return self.refused(error)

    @abstractmethod
    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed."""


def event(body: object) -> bytes:
    return b"data: " + to_json(body).encode() + b"\n\n"


def named_event(body: Mapping[str, Any]) -> bytes:
    """Encodes an event whose name is the `type` of its body."""
    return f"event: {body['type']}\ndata: {to_json(body)}\n\n".encode()
