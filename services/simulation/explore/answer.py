"""The answer that a client has received."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from zlib import crc32


@dataclass(slots=True)
class Answer:
    """The part of an answer that a client has received so far. The mappings' keys are indices of
    choices, or numbers of turns in a session (a conversation whose inputs arrive one by one).
    """

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    """Empty if the request was sent over HTTP."""
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    """Log-probabilities of the tokens of the prompt and the answer, in order."""
    finished: dict[int, str] = field(default_factory=dict)
    num_cached_tokens: int = 0
    """Not compared between answers, because it depends on the other requests."""
    seconds: float = 0.0
    """The time until the end of the answer, without a session's pauses."""
    left_at: float | None = None
    """The time at which the client left before the answer's end. None if no client left, or if
    another client with the same idempotency key may still wait for the answer.
    """
    error: str | None = None
    same_key: list["Answer"] = field(default_factory=list)
    """The answers to all requests with the same idempotency key. Empty for a request without one.
    """

    def clear(self) -> None:
        """Drops all received parts, because the request is sent again."""
        for part in (self.texts, self.token_ids, self.logprobs, self.finished):
            part.clear()
        self.num_cached_tokens, self.error = 0, None

    def add(self, index: int, text: str, token_ids: Iterable[int] = ()) -> None:
        self.texts[index] = self.texts.get(index, "") + text
        if token_ids:
            self.token_ids.setdefault(index, []).extend(token_ids)

    def add_vector(self, index: int, numbers: Iterable[float]) -> None:
        values = array("f", numbers)
        self.texts[index] = f"{len(values)} numbers, {crc32(values.tobytes()):08x}"
        self.finished[index] = "vector"

    def equals(self, whole: "Answer") -> bool:
        """Whether this is the same complete answer as `whole`, which arrived over gRPC."""
        is_equal = (self.texts, self.finished, self.logprobs) == (
            whole.texts,
            whole.finished,
            whole.logprobs,
        )
        return is_equal and self.error is None and self.token_ids in ({}, whole.token_ids)

    def begins(self, whole: "Answer") -> bool:
        """Whether this is a beginning of the answer `whole`."""
        return all(
            whole.texts.get(index, "").startswith(text) for index, text in self.texts.items()
        ) and all(
            whole.token_ids.get(index, [])[: len(ids)] == ids
            for index, ids in self.token_ids.items()
        )
