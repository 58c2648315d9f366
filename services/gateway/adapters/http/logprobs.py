"""Log-probabilities as OpenAI's and vLLM's answers write them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from services.gateway.adapters.http.token_text import TokenText
from services.gateway.core.logprobs import LogprobRows

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


def prompt_logprobs(rows: LogprobRows | None, tokens: TokenText) -> Iterator[Any]:
    """vLLM's `prompt_logprobs`: per prompt token a map from token id to logprob, rank and text."""
    yield None
    for ids, probs, own_rank in rows.rows() if rows is not None else ():
        entries = {}
        for rank, (token, prob) in enumerate(zip(ids[1:], probs[1:], strict=True), start=1):
            entries[str(token)] = _ranked(prob, rank, token, tokens)
        entries[str(ids[0])] = _ranked(probs[0], own_rank, ids[0], tokens)
        yield entries


def _ranked(logprob: float, rank: int, token_id: int, tokens: TokenText) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": tokens.written(token_id)}
