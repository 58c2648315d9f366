"""The output of one sequence (the prompt and one answer of a request): the whole output so far, and
the output since the last read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.common.errors import StepwellError
from services.common.request.finish import Finish
from services.gateway.core.request.logprobs import LogprobRows


@dataclass(frozen=True, slots=True)
class Progress:
    """The output of a sequence so far: the tokens, the number of rows of prompt log-probabilities,
    and whether the sequence has ended.
    """

    token_ids: list[int]
    num_prompt_rows: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class Delta:
    """The output of one sequence since the reader took the previous delta."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    num_cached_tokens: int | None = None
    """Number of cached prompt tokens. It is None if no replica has scheduled the sequence since the
    previous delta.
    """
    finish: Finish | None = None
    error: StepwellError | None = None
    """The error that ended the sequence. If it is set, `finish` is None and no delta follows."""
    pooled: bytes | None = None
    """The vector of the prompt as little-endian float32 numbers."""

    def take_error(self) -> StepwellError:
        """Returns the error and removes the reference to it. The traceback of a raised error refers
        to frames that contain this delta, so the reference would form a cycle.
        """
        error, self.error = self.error, None
        assert error is not None
        return error

    def cut(self, max_tokens: int) -> "Iterator[Delta]":
        """Splits the delta into deltas of at most `max_tokens` tokens. Only the last delta has the
        finish reason or error.
        """
        num_tokens = len(self.token_ids)
        for start in range(0, max(num_tokens, 1), max_tokens):
            stop = start + max_tokens
            is_last = stop >= num_tokens
            yield Delta(
                self.token_ids[start:stop],
                None if self.logprobs is None else self.logprobs.part(start, stop),
                self.prompt_logprobs if start == 0 else None,
                self.num_cached_tokens if start == 0 else None,
                self.finish if is_last else None,
                self.error if is_last else None,
                self.pooled if is_last else None,
            )


def parts_of(
    deltas: list[tuple[int, Delta]], max_tokens: int
) -> Sequence[Sequence[tuple[int, Delta]]]:
    """Splits a list of deltas, each with its sequence's index, into parts of about `max_tokens`
    tokens. No part is empty. If there are both tokens and errors, the errors form the last part, so
    that the tokens are delivered first.

    Usually there is one part, since a fast reader finds only one step's tokens in a delta.
    """
    num_tokens, has_error = 0, False
    for _, delta in deltas:
        num_tokens += len(delta.token_ids)
        has_error |= delta.error is not None
    if has_error and num_tokens:
        errors = [
            (index, Delta(error=delta.take_error())) for index, delta in deltas if delta.error
        ]
        before = [(index, delta) for index, delta in deltas if delta != Delta()]
        return (*parts_of(before, max_tokens), errors)
    return (deltas,) if num_tokens <= max_tokens else _parts_of_tokens(deltas, max_tokens)


def _parts_of_tokens(
    deltas: list[tuple[int, Delta]], max_tokens: int
) -> list[list[tuple[int, Delta]]]:
    parts: list[list[tuple[int, Delta]]] = [[]]
    num_tokens = 0
    for index, delta in deltas:
        for piece in delta.cut(max_tokens):
            if num_tokens >= max_tokens:
                parts.append([])
                num_tokens = 0
            parts[-1].append((index, piece))
            num_tokens += len(piece.token_ids)
    return parts
