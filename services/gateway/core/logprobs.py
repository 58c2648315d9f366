"""Log-probabilities of consecutive positions, and how OpenAI's and vLLM's answers write them."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from services.gateway.core.tokens import TokenText

# JSON has no -inf; this is what OpenAI's API writes for a token that could not be.
LOWEST_LOGPROB = -9999.0


@dataclass(slots=True)
class LogprobRows:
    """A dense matrix, row-major: column 0 is the position's token, the others the best, in order.

    `token_ids` and `logprobs` hold rows x `width` values, `ranks` one per row, each as packed
    numbers of 4 bytes: in lists they would take nine times as much.
    """

    width: int
    token_ids: "array[int]"
    logprobs: "array[float]"
    ranks: "array[int]"

    @classmethod
    def of(
        cls,
        width: int,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int],
    ) -> "LogprobRows":
        """Rows of any sequences of numbers."""
        return cls(width, array("i", token_ids), array("f", logprobs), array("I", ranks))

    def __len__(self) -> int:
        return len(self.ranks)

    def extend(self, other: "LogprobRows") -> None:
        """Appends the rows of `other`, which has the same width."""
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.ranks += other.ranks

    def head(self, num_rows: int) -> "LogprobRows":
        """The first rows."""
        cells = num_rows * self.width
        return LogprobRows(
            self.width, self.token_ids[:cells], self.logprobs[:cells], self.ranks[:num_rows]
        )

    def after(self, num_rows: int) -> "LogprobRows":
        """The rows that follow the first ones."""
        cells = num_rows * self.width
        return LogprobRows(
            self.width, self.token_ids[cells:], self.logprobs[cells:], self.ranks[num_rows:]
        )

    def rows(self) -> Iterator[tuple[list[int], list[float], int]]:
        """Each row: its token ids, their log-probabilities, the rank of its own token."""
        for row, rank in enumerate(self.ranks):
            cells = slice(row * self.width, (row + 1) * self.width)
            yield (
                self.token_ids[cells].tolist(),
                [max(p, LOWEST_LOGPROB) for p in self.logprobs[cells]],
                rank,
            )


# The four parallel lists of a completion's `logprobs`.
TOKENS, TOKEN_LOGPROBS, TOP_LOGPROBS, TEXT_OFFSET = (
    "tokens",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
)


def chat_logprobs(rows: LogprobRows, tokens: TokenText) -> Iterator[dict[str, Any]]:
    """`logprobs.content` of a chat answer: one entry per token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokens.raw(token_id)
        return {"token": tokens.written(token_id), "logprob": logprob, "bytes": list(raw)}

    for ids, probs, _ in rows.rows():
        yield {
            **entry(ids[0], probs[0]),
            "top_logprobs": [entry(*best) for best in zip(ids[1:], probs[1:], strict=True)],
        }


def completion_logprobs(
    rows: LogprobRows, offsets: Sequence[int], tokens: TokenText
) -> dict[str, Iterable[Any]]:
    """`logprobs` of a completion: four parallel lists.

    `offsets` says where the text of each token starts. The token itself is always among its top
    log-probabilities, which then are one more than asked for.
    """

    def top(ids: list[int], probs: list[float]) -> dict[str, float]:
        best = {tokens.written(token): prob for token, prob in zip(ids[1:], probs[1:], strict=True)}
        best.setdefault(tokens.written(ids[0]), probs[0])
        return best

    return {
        TOKENS: (tokens.written(ids[0]) for ids, _, _ in rows.rows()),
        TOKEN_LOGPROBS: (probs[0] for _, probs, _ in rows.rows()),
        TOP_LOGPROBS: (top(ids, probs) for ids, probs, _ in rows.rows()),
        TEXT_OFFSET: offsets,
    }


def echoed_logprobs(
    first_token: int, rows: LogprobRows | None, offsets: Sequence[int], tokens: TokenText
) -> dict[str, Iterable[Any]]:
    """`logprobs` of an echoed prompt, whose first token has none.

    `offsets` says where each of its tokens starts.
    """
    first: dict[str, list[Any]] = {
        TOKENS: [tokens.written(first_token)],
        TOKEN_LOGPROBS: [None],
        TOP_LOGPROBS: [None],
        TEXT_OFFSET: [offsets[0]],
    }
    if rows is None:
        return {**first}
    rest = completion_logprobs(rows, offsets[1:], tokens)
    return {name: chain(first[name], rest[name]) for name in first}


def joined(rows: LogprobRows | None, more: LogprobRows | None) -> LogprobRows | None:
    """Rows followed by more rows, either of which may be missing. May grow `rows` in place."""
    if rows is None or more is None:
        return more if rows is None else rows
    rows.extend(more)
    return rows


def prompt_logprobs(rows: LogprobRows | None, tokens: TokenText) -> Iterator[Any]:
    """vLLM's `prompt_logprobs`: per prompt token a map from token id to logprob, rank and text."""
    yield None
    for ids, probs, rank in rows.rows() if rows is not None else ():
        entries = {}
        for place, (token, prob) in enumerate(zip(ids[1:], probs[1:], strict=True), start=1):
            entries[str(token)] = _ranked(prob, place, token, tokens)
        entries[str(ids[0])] = _ranked(probs[0], rank, ids[0], tokens)
        yield entries


def _ranked(logprob: float, rank: int, token_id: int, tokens: TokenText) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": tokens.written(token_id)}
